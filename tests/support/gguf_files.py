"""Tiny random models as GGUF files, written by the `gguf` package as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.gguf.kinds import QUANTIZED_KINDS
from support.models import CHAT_TEMPLATE, SPECIAL_TOKENS

SCALES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,)},
}
"""Where each kind's blocks hold fp16 scales and minima."""
WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32", "F16", "BF16")
"""The kinds that the package can write."""
TOKENS = (*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "\u0120w", *SPECIAL_TOKENS)
"""A byte-level vocabulary, its tokens of two and more bytes by `MERGES`."""
MERGES = ("h e", "l l", "he ll", "\u0120 w")
_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def random_blocks(kind: str, rows: int, columns: int, *, seed: int = 0, std: float = 1.0) -> Tensor:
    """uint8 `[rows, bytes]`: any codes, with finite scales."""
    generator = torch.Generator().manual_seed(seed)
    size = QUANTIZED_KINDS[kind]
    shape = (rows * columns // size.values, size.num_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for start in SCALES[kind]:
        scales = torch.randn(len(blocks), 1, generator=generator) * std
        blocks[:, start : start + 2] = scales.half().view(torch.uint8)
    return blocks.view(rows, -1)


def dequantized(data: Tensor, kind: str) -> Tensor:
    """fp32 `[rows, columns]`, by the package."""
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), GGMLQuantizationType[kind]))


def write_model(
    path: Path,
    config: Any,
    architecture: str,
    *,
    kind_of: Callable[[str], str] = lambda name: "F32",
    settings: Callable[[GGUFWriter], object] = lambda writer: None,
) -> dict[str, Tensor]:
    """Write a random model of this configuration, and return its weights by transformers' names.

    `kind_of` chooses the kind of a matrix by its name in the file. `settings` writes metadata
    beyond that of all architectures.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    writer = GGUFWriter(path, architecture)
    write_settings(writer, config)
    write_byte_tokenizer(writer)
    settings(writer)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    stored = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if parameter.ndim == 1:
            parameter = torch.randn_like(parameter) / 4
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), parameter.chunk(2, dim=1), strict=True)
            parts = {name.replace("gate_up_proj", half): part for half, part in halves}
        else:
            parts = {name: parameter}
        written = []
        for part, weight in parts.items():
            module = part.removesuffix(".weight").removesuffix(".bias")
            suffix = ".bias" if part.endswith(".bias") else ".weight"
            source = names.get_name(module)
            assert source is not None, part
            kind = kind_of(source) if weight.ndim > 1 else "F32"
            written.append(_write(writer, source + suffix, weight, kind, config))
        stored[name] = torch.cat(written, dim=1) if len(written) > 1 else written[0]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def write_settings(writer: GGUFWriter, config: Any) -> None:
    """The metadata that all architectures have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def write_byte_tokenizer(writer: GGUFWriter) -> None:
    """`TOKENS` and `MERGES` as a byte-level tokenizer with a chat template."""
    is_special = [token in SPECIAL_TOKENS for token in TOKENS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if special else 1 for special in is_special])
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(TOKENS.index("<|end|>"))
    writer.add_chat_template(CHAT_TEMPLATE)


def _write(writer: GGUFWriter, name: str, weight: Tensor, kind: str, config: Any) -> Tensor:
    """Write a tensor, and return its values as they are stored."""
    if writer.arch.startswith("gemma") and name.endswith("norm.weight"):
        writer.add_tensor(name, (weight + 1).numpy())
        return weight
    *rows, columns = weight.shape
    if weight.ndim == 1:
        data, values = weight, weight
    elif kind in WRITABLE:
        quantized = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
        data = torch.from_numpy(quantized)
        values = dequantized(data, kind)
    else:
        num_rows = torch.Size(rows).numel()
        data = random_blocks(kind, num_rows, columns, seed=len(name), std=3e-4)
        values = dequantized(data, kind)
        data, values = data.view(*rows, -1), values.view(weight.shape)
    if writer.arch == "llama":
        data = _paired_rows(name, data, config)
    writer.add_tensor(name, data.contiguous().numpy(), raw_dtype=GGMLQuantizationType[kind])
    return values.view(weight.shape)


def _paired_rows(name: str, data: Tensor, config: Any) -> Tensor:
    """The rows of queries and keys in the order of llama.cpp's rotation: those that are rotated
    together are neighbours."""
    leaf = name.split(".")[-2]
    if leaf not in _ROTATED:
        return data
    num_heads = getattr(config, _ROTATED[leaf])
    halves = data.view(num_heads, 2, -1, *data.shape[1:])
    return halves.transpose(1, 2).reshape(data.shape)


def mixture(kinds: Mapping[str, str], default: str) -> Callable[[str], str]:
    """The kind of a matrix by the last part of its name in the file."""
    return lambda name: kinds.get(name.split(".")[-1], default)
