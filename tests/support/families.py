"""Tiny random models of many transformers families, saved like real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
GPT2: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_positions": 256}
MLA: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
FOUR_LAYERS = {"num_hidden_layers": 4}
"""For the types whose every fourth layer is another one."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 128,
}
_HYBRID = ["linear_attention", "full_attention"]
_LATENT_HYBRID = {
    **EXPERTS,
    **MLA,
    "head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "topk_group": 1,
    "layer_group_size": 2,
}

STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": ("bailing_hybrid", _LATENT_HYBRID),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", _MAMBA2),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8}),
    "granitemoehybrid": ("granitemoehybrid", {**EXPERTS, **_MAMBA2, "layer_types": _HYBRID}),
    "jamba": (
        "jamba",
        {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    ),
    "kimi_linear": ("kimi_linear", {**_LATENT_HYBRID, "layer_types": _HYBRID}),
    "lara_mini": (
        "lara_mini",
        {
            **_LINEAR_ATTENTION,
            "sliding_window": 8,
            "layer_types": [*_HYBRID, "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "lfm2_moe",
        {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "lfm3": ("lfm3", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 16, "n_groups": 2},
    ),
    "minimax": (
        "minimax",
        {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_LINEAR_ATTENTION, "layer_types": _HYBRID}),
    "qwen3_5": ("qwen3_5_text", {**_LINEAR_ATTENTION, "layer_types": _HYBRID}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**EXPERTS, **_LINEAR_ATTENTION, "layer_types": _HYBRID}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **_LINEAR_ATTENTION, "layer_types": _HYBRID}),
    "zamba2": (
        "zamba2",
        {
            # The first and the last hybrid layer share the weights of their attention and MLP.
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            "num_hidden_layers": 4,
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "mamba_d_state": 16,
            "chunk_size": 16,
            # With larger weights transformers itself is off by 1e-4 in fp32.
            "initializer_range": 0.1,
        },
    ),
}
"""Case name to (model type, differences): models with states beside or instead of attention."""

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "biogpt": ("biogpt", {}),
    "bloom-slopes": ("bloom", {"n_layer": 2, "n_head": 4}),
    "cohere": ("cohere", {}),
    "cohere2-window": ("cohere2", {**FOUR_LAYERS, "sliding_window": 8}),
    "deepseek_v2-mla": ("deepseek_v2", {**EXPERTS, **MLA}),
    "deepseek_v3-mla": ("deepseek_v3", {**EXPERTS, **MLA, "n_group": 2}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
    "exaone4-window": ("exaone4", {**FOUR_LAYERS, "sliding_window": 8}),
    "falcon-one-kv-head": ("falcon", {"multi_query": True, "parallel_attn": False}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "gemma": ("gemma", {}),
    "gemma2-softcap-window": (
        "gemma2",
        {"sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3-window": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": (
        "glm4_moe",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1},
    ),
    "gpt2-conv1d": ("gpt2", GPT2),
    "gpt_bigcode": ("gpt_bigcode", {**GPT2, "n_inner": 96}),
    "gpt_neo-window": (
        "gpt_neo",
        {
            "attention_types": [[["global", "local"], 1]],
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 8,
        },
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss-sinks-window": (
        "gpt_oss",
        {**EXPERTS, "sliding_window": 8, "rope_parameters": YARN},
    ),
    "granite": ("granite", {"attention_multiplier": 0.25}),
    "granitemoe": ("granitemoe", {**EXPERTS, "attention_multiplier": 0.25}),
    "helium": ("helium", {}),
    "jetmoe": ("jetmoe", EXPERTS),
    "llama": ("llama", {}),
    "llama4-chunks": (
        "llama4_text",
        {
            **EXPERTS,
            **FOUR_LAYERS,
            "attention_chunk_size": 8,
            "floor_scale": 6,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", EXPERTS),
    "mpt-slopes": ("mpt", {"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 512}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3-window": ("olmo3", {**FOUR_LAYERS, "sliding_window": 8}),
    "olmoe": ("olmoe", EXPERTS),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("phi", {}),
    "phi3-fused": ("phi3", {}),
    "phimoe-window": ("phimoe", {**EXPERTS, "sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {
            **EXPERTS,
            **FOUR_LAYERS,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", FOUR_LAYERS),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "xglm": (
        "xglm",
        {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    ),
}
"""Case name to (model type, what differs from the common tiny configuration)."""
LIKE_OTHERS = {
    *("falcon", "falcon-one-kv-head", "gpt_neo-window", "mpt-slopes", "xglm"),
    *("arcee", "cohere", "ernie4_5", "ernie4_5_moe", "exaone4-window", "gemma", "glm", "granite"),
    *("granitemoe", "mixtral", "olmo", "olmo3-window", "olmoe", "qwen2", "qwen3", "seed_oss"),
}
"""Those whose attention and layers others have too; `make base-evidence` tries all."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon-alibi": ("falcon", {"alibi": True}, "rounds the biases of its ALiBi"),
    "openai-gpt": ("openai-gpt", {**GPT2, "n_layer": 2}, "attention interface 0 times"),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {**EXPERTS, "moe_topk": 2, "head_dim": 16},
        "otherwise than by calling them",
    ),
}
"""Case name to (model type, differences, part of the reason)."""


def save_family(path: Path, model_type: str, differences: dict[str, Any]) -> Path:
    """Write a tiny random model of this type in the Hugging Face layout, fp32."""
    settings = {**COMMON, **differences}
    if isinstance(getattr(CONFIG_MAPPING[model_type], "head_dim", None), property):
        del settings["head_dim"]  # it follows from others
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
