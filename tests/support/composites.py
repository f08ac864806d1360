"""Tiny composite models, for text and images, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from support.families import COMMON, EXPERTS, STATES

_TEXT = {name: value for name, value in COMMON.items() if not name.endswith("token_id")}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA = {
    **_TEXT,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_GEMMA, "query_pre_attn_scalar": 16},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "head_dim": 16},
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **STATES["qwen3_5"][1]},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            **EXPERTS,
            "attention_chunk_size": 8,
            "floor_scale": 6,
            "no_rope_layers": [1, 0],
        },
        "vision_config": {
            **_VISION,
            **{"intermediate_size": 128, "vision_output_dim": 32},
            **{"projector_input_dim": 32, "projector_output_dim": 32},
        },
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
    },
}


_GEMMA4_TEXT = {
    **_GEMMA,
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    **{"vocab_size_per_layer_input": 128, "global_head_dim": 16},
}
OTHERS: dict[str, dict[str, Any]] = {
    "fuyu": {"text_config": {**_TEXT, "model_type": "persimmon"}},
    "gemma3n": {
        "text_config": {
            **_GEMMA,
            **{"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 2},
            **{"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
            "laurel_rank": 16,
        },
    },
    "gemma4": {"text_config": _GEMMA4_TEXT, "vision_config": None, "audio_config": None},
    "gemma4_assistant": {"text_config": _GEMMA4_TEXT},
    "gemma4_unified": {"text_config": _GEMMA4_TEXT, "vision_config": None, "audio_config": None},
    "gemma4_unified_assistant": {"text_config": _GEMMA4_TEXT},
    "got_ocr2": {"text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": _VISION},
    "moss_transcribe_diarize": {"text_config": {**_TEXT, "model_type": "qwen3"}},
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **STATES["qwen3_5_moe"][1]},
        "vision_config": COMPOSITES["qwen3_5"]["vision_config"],
    },
}
"""Types that are in transformers' list of causal language models."""


def save_composite(path: Path, model_type: str) -> PreTrainedModel:
    """Write a random model of this type; returns it."""
    config = AutoConfig.for_model(model_type, **COMPOSITES[model_type])
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    model.save_pretrained(path)
    return model
