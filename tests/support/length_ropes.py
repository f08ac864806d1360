"""Tiny models whose rotary frequencies depend on the length, and transformers' own for a length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.families import EXPERTS, save_family
from support.greedy import load_dense

BORDER, LONGEST = 24, 96
"""The original context, and the longest sequence."""

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0 + index / 16 for index in range(8)],
    "long_factor": [2.0 + index / 2 for index in range(8)],
    "original_max_position_embeddings": BORDER,
}
_FULL = {"max_position_embeddings": LONGEST}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": LONGEST / BORDER}
_ORIGINAL = {"max_position_embeddings": BORDER}
_TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

LENGTH_ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": (
        "phi3",
        {**_FULL, "original_max_position_embeddings": BORDER, "rope_parameters": _LONGROPE},
    ),
    # Its factors are for cosines and sines, not for frequencies.
    "phimoe": (
        "phimoe",
        {
            **_FULL,
            **EXPERTS,
            "rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
        },
    ),
    "minicpm3": ("minicpm3", {**_FULL, **_LATENT, "rope_parameters": _LONGROPE}),
    "gemma3-longrope": (
        "gemma3_text",
        {
            **_FULL,
            **_TWO_KINDS,
            "rope_parameters": {"full_attention": _LONGROPE, "sliding_attention": _DEFAULT},
        },
    ),
    "gemma3-dynamic": (
        "gemma3_text",
        {
            **_ORIGINAL,
            **_TWO_KINDS,
            "rope_parameters": {"full_attention": _DYNAMIC, "sliding_attention": _DEFAULT},
        },
    ),
    "llama-dynamic": ("llama", {**_ORIGINAL, "rope_parameters": _DYNAMIC}),
}
"""Case name to (model type, differences)."""


def save(path: Path, case: str) -> Path:
    return save_family(path, *LENGTH_ROPES[case])


def load_dense_for(path: Path, length: int) -> Any:
    """transformers' model with the frequencies that it has for a text of this length, whatever the
    length of the next text of more than two tokens; a dynamic rope forgets a long one when it sees
    one within its original context."""
    dense = load_dense(path)
    rope = dense.config.rope_parameters
    # Phi-3's configuration has the border twice.
    for part in (vars(dense.config), rope, *rope.values()):
        if isinstance(part, dict) and "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = LONGEST if length <= BORDER else 2
    with torch.inference_mode():
        dense(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    return dense


def logits_of(dense: Any, tokens: list[int]) -> Tensor:
    """`[num_tokens, vocab]`."""
    with torch.inference_mode():
        logits: Tensor = dense(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
