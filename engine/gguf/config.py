"""The configuration of a GGUF file's model, as its `config.json` would have it. Imports no torch.

A setting that is read wrongly changes every answer. So an architecture is read only if all its
settings are known, and a file with another setting is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DamagedBase, ForeignBase, UnsupportedModel
from .header import Array, GgufHeader, read_header
from .rope import long_rope, rope, rope_scaling
from .settings import Settings

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
_DTYPES = {"F32": "float32", "F16": "float16"}


class Architecture(NamedTuple):
    """How a GGUF architecture is described in `config.json` and stored in the file."""

    model_type: str
    model_class: str
    extra: Callable[[Settings], dict[str, Any]] | None = None
    """Its settings beyond those that all architectures have."""
    pairs_rotary_rows: bool = False
    """Rows of the query and key projections that are rotated together are adjacent in the file;
    the models of transformers have them half a head apart."""
    adds_one_to_norms: bool = False
    """The file has the factors themselves. The models of transformers add one to theirs."""


def read_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json` for this file's model.

    `dtype` is that of the embedding and the other matrices, bfloat16 if they are quantized.
    Raises DamagedBase, ForeignBase or QuantizedBase as `read_header` does, and UnsupportedModel for
    an architecture or a setting that is not supported.
    """
    return config_of(read_header(path))


def config_of(header: GgufHeader) -> dict[str, Any]:
    """As `read_config`, of a header that was read."""
    architecture = architecture_of(header)
    settings = Settings(header)
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "dtype": _dtype(header),
        "tie_word_embeddings": HEAD not in header.tensors,
        **_sizes(settings),
        **_special_tokens(header),
    }
    config |= (architecture.extra or _whole_rope)(settings)
    settings.check_all_used()
    return config


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises UnsupportedModel, which names the architecture, if it is not supported."""
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise UnsupportedModel(
            f"{header.path} has the GGUF architecture {header.architecture}; supported: "
            f"{', '.join(ARCHITECTURES)}: give the original checkpoint"
        )
    return architecture


def _sizes(settings: Settings) -> dict[str, Any]:
    tensors = settings.header.tensors
    if EMBEDDING not in tensors or len(tensors[EMBEDDING].shape) != 2:
        raise ForeignBase(f"{settings.header.path} has no {EMBEDDING}: it holds no language model")
    vocab_size, embedding_size = tensors[EMBEDDING].shape
    hidden_size = settings.integer("embedding_length")
    num_layers = settings.integer("block_count")
    num_heads = settings.integer("attention.head_count")
    num_kv_heads = settings.integer("attention.head_count_kv", num_heads)
    head_dim = settings.integer("attention.key_length", hidden_size // num_heads)
    settings.must_be("attention.value_length", head_dim)
    settings.must_be("attention.causal", True)
    if hidden_size != embedding_size:
        raise DamagedBase(
            f"{settings.header.path}: embedding_length is {hidden_size}, but {EMBEDDING} has "
            f"{embedding_size} columns: download the file again"
        )
    fits = head_dim <= hidden_size and head_dim % 2 == 0 and num_heads % num_kv_heads == 0
    if num_layers > len(tensors) or not fits:
        raise DamagedBase(
            f"{settings.header.path}: {num_layers} layers, {num_heads} and {num_kv_heads} heads "
            f"of the size {head_dim} do not fit its tensors: download the file again"
        )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": settings.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.integer("context_length"),
    }


def _dtype(header: GgufHeader) -> str:
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _special_tokens(header: GgufHeader) -> dict[str, int | None]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {
        key: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name, key in names.items()
    }
    vocab_size = header.tensors[EMBEDDING].shape[0]
    # A token outside the vocabulary is no token: converters write -1 for none.
    return {
        key: token if type(token) is int and 0 <= token < vocab_size else None
        for key, token in found.items()
    }


def _has(settings: Settings, names: Collection[str]) -> bool:
    return any(name in settings.header.tensors for name in names)


def _whole_rope(settings: Settings) -> dict[str, Any]:
    return {"rope_parameters": rope(settings)}


def _llama(settings: Settings) -> dict[str, Any]:
    return {
        "attention_bias": _has(settings, ["blk.0.attn_q.bias"]),
        "mlp_bias": _has(settings, ["blk.0.ffn_up.bias"]),
        **_whole_rope(settings),
    }


def _qwen3(settings: Settings) -> dict[str, Any]:
    return {"attention_bias": _has(settings, ["blk.0.attn_q.bias"]), **_whole_rope(settings)}


def _experts(settings: Settings) -> dict[str, Any]:
    num_experts = settings.integer("expert_count")
    for name, tensor in settings.header.tensors.items():
        if name.endswith("_exps.weight") and tensor.shape[0] != num_experts:
            raise DamagedBase(
                f"{settings.header.path}: {name} has {tensor.shape[0]} experts, not {num_experts}: "
                "download the file again"
            )
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": settings.integer("expert_used_count"),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(settings: Settings) -> dict[str, Any]:
    shared = settings.integer("expert_shared_feed_forward_length")
    return {
        **_experts(settings),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
        **_whole_rope(settings),
    }


def _qwen3_moe(settings: Settings) -> dict[str, Any]:
    return {**_experts(settings), "norm_topk_prob": True, **_qwen3(settings)}


def _gemma2(settings: Settings) -> dict[str, Any]:
    return {
        "sliding_window": settings.integer("attention.sliding_window"),
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(settings, layers_of_27b=46),
        **_whole_rope(settings),
    }


def _gemma3(settings: Settings) -> dict[str, Any]:
    settings.must_be("rope.dimension_count", settings.head_dim)
    config = {
        "sliding_window": settings.integer("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(settings, layers_of_27b=62),
        "rope_parameters": {
            "full_attention": {
                "rope_theta": settings.number("rope.freq_base", 1e6),
                **rope_scaling(settings),
            },
            "sliding_attention": {
                "rope_theta": settings.number("rope.freq_base_swa", 1e4),
                "rope_type": "default",
            },
        },
    }
    if settings.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = settings.number("final_logit_softcapping")
    return config | _sliding_layers(settings)


def _sliding_layers(settings: Settings) -> dict[str, Any]:
    """`layer_types`: each n-th layer has full attention, or the file has a flag for each layer."""
    key = "attention.sliding_window_pattern"
    num_layers = settings.integer("block_count")
    if isinstance(settings.header.metadata.get(f"{settings.header.architecture}.{key}"), Array):
        is_sliding = settings.flags(key)
        if len(is_sliding) != num_layers:
            raise DamagedBase(
                f"{settings.header.path}: {key} has {len(is_sliding)} entries for {num_layers} "
                "layers: download the file again"
            )
    else:
        interval = settings.integer(key, 6)
        is_sliding = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]
    return {"layer_types": kinds}


def _query_scale(settings: Settings, *, layers_of_27b: int) -> int:
    """The file does not have it. It is the size of a head, but for the model with 27 billion
    parameters, which is known by its number of layers."""
    if settings.integer("block_count") != layers_of_27b:
        return settings.head_dim
    return settings.integer("embedding_length") // settings.integer("attention.head_count")


def _phi3(settings: Settings) -> dict[str, Any]:
    context = settings.integer("context_length")
    original = settings.integer("rope.scaling.original_context_length", context)
    config: dict[str, Any] = {
        "original_max_position_embeddings": original,
        "rope_parameters": long_rope(settings, original),
    }
    if settings.has("attention.sliding_window"):
        config["sliding_window"] = settings.integer("attention.sliding_window")
    return config


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, pairs_rotary_rows=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", adds_one_to_norms=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, adds_one_to_norms=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, adds_one_to_norms=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
}
"""By their name in the file. Mistral's models are of the architecture llama."""
