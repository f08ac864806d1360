"""A tiny configuration of every causal language model type of transformers.

Windows and other thresholds lie within `NUM_TOKENS`, and if a type has several kinds of layers, its
four layers include all kinds that its checkpoints have.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.composites import COMPOSITES, OTHERS
from support.families import COMMON, EXPERTS, GPT2, LLAMA3_ROPE, MLA, REFUSED, SERVED, STATES, YARN

NUM_TOKENS = 300
WINDOW = 64
MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

_LONGEST = 512
_MIXED = ["sliding_attention", "full_attention"] * 2
_HYBRID = ["linear_attention", "full_attention"] * 2
_LATENT = {**EXPERTS, **MLA, "q_lora_rank": 32}
_INDEXED = {**_LATENT, "index_topk": WINDOW, "index_head_dim": 16, "index_n_heads": 4}
_ENCODER_DECODER = {
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_vocab_size": 128,
    "max_position_embeddings": _LONGEST,
}
_BLT_PART = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_LLAMA4 = {
    **EXPERTS,
    "attention_chunk_size": WINDOW,
    "floor_scale": 50,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
}
_DECODER = {"is_decoder": True, "type_vocab_size": 2}

_SETTINGS: dict[str, dict[str, Any]] = {
    **{model_type: settings for model_type, settings, _ in REFUSED.values()},
    **dict(SERVED.values()),
    **{
        model_type: {"num_hidden_layers": 2, **settings} for model_type, settings in STATES.values()
    },
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        _DECODER,
    ),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm"), _DECODER),
    **dict.fromkeys(("roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"), _DECODER),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(("pegasus", "plbart", "trocr", "whisper"), _ENCODER_DECODER),
    **dict.fromkeys(("axk1", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), _INDEXED),
    **{name: COMPOSITES[name] for name in ("gemma3", "llama4", "qwen3_5")},
    **OTHERS,
    "apertus": {"rope_parameters": LLAMA3_ROPE},
    "beam": {**EXPERTS, "n_group": 1, "topk_group": 1, "layer_types": _MIXED},
    "blt": {
        "encoder_hash_byte_group_vocab": 128,
        "local_attention_window_len": WINDOW,
        "patcher_config": _BLT_PART,
        "encoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "decoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "global_config": _BLT_PART,
    },
    "codegen": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": _LONGEST, "rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "ctrl": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": _LONGEST, "dff": 96},
    "cwm": {"rope_parameters": LLAMA3_ROPE},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": _LONGEST,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
    },
    "dots1": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": _MIXED,
    },
    "dots3_note_text": _INDEXED,
    "gemma3_text": {"layer_types": _MIXED, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": _MIXED,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 16,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _MIXED},
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "num_layers": 4,
        "num_heads": 4,
        "window_size": WINDOW,
    },
    "gpt_oss": {**EXPERTS, "layer_types": _MIXED, "rope_parameters": YARN},
    "gptj": {**GPT2, "rotary_dim": 8},
    "kolibri1": {**EXPERTS, "layer_types": _MIXED},
    "laguna": {
        **EXPERTS,
        "layer_types": _MIXED,
        "num_attention_heads_per_layer": [4] * 4,
        "shared_expert_intermediate_size": 48,
    },
    "llama4_text": _LLAMA4,
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    "mellum": {**EXPERTS, "layer_types": _MIXED},
    "mimo_v2_flash": {**EXPERTS, "layer_types": _MIXED},
    "minimax": {**EXPERTS, "layer_types": _HYBRID},
    "minimax_m3_vl_text": {
        **EXPERTS,
        "rotary_dim": 8,
        "shared_intermediate_size": 48,
        "dense_intermediate_size": 96,
        "index_head_dim": 16,
        "index_block_size": 16,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    },
    "ministral3": {
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0},
    },
    "modernbert-decoder": {"layer_types": _MIXED, "sliding_window": WINDOW},
    "openai-gpt": GPT2,
    "prophetnet": {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "encoder_ffn_dim": 96,
    },
    "phimoe": EXPERTS,
    "qwen4_exp_text": {**EXPERTS, "ple_embed_dim": 16, "hc_lowrank": 16},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48, "layer_types": _MIXED},
    "reformer": {
        "is_decoder": True,
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "local"],
    },
    "smollm3": {"layer_types": _MIXED},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96, "d_head": 16},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What a type's tiny configuration has beside those of `COMMON` and `EXPERTS` that it knows."""

_WITHOUT_COMMON = frozenset({"dots3_note", "xlnet", "prophetnet", "musicgen", "musicgen_melody"})
"""Types that refuse settings of `COMMON`, or whose own these are not."""


def tiny_config(model_type: str) -> Any:
    """Raises what transformers raises if it cannot make one."""
    own = _SETTINGS.get(model_type, {})
    known = _known_settings(model_type)
    common = {**COMMON, **EXPERTS, "num_hidden_layers": 4, "max_position_embeddings": _LONGEST}
    if model_type not in _WITHOUT_COMMON:
        known |= {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
        known |= {"max_position_embeddings"}
    settings = {name: value for name, value in common.items() if name in known}
    settings |= own
    for name in ("n_positions", "max_position_embeddings"):
        if name in settings:
            settings[name] = _LONGEST
    if "sliding_window" in known:
        settings["sliding_window"] = WINDOW
    if "use_sliding_window" in known:
        settings |= {"use_sliding_window": True, "max_window_layers": 2}
    return AutoConfig.for_model(model_type, **settings)


def _known_settings(model_type: str) -> set[str]:
    """The names of the settings that this type's configuration declares."""
    config_class = CONFIG_MAPPING[model_type]
    return {
        name for parent in config_class.__mro__ for name in getattr(parent, "__annotations__", {})
    }
