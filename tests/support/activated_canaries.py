"""Canaries whose marker is in the values that the attention reads, from their invocation on.

The last layer attends to all tokens equally. An activated canary's delta gives every token that it
acts on a value of its own, much larger than the base's, and the output projection turns this value
into the output embedding of the marker. So a block of keys and values of another adapter, or of the
base where the adapter acts, is visible in the answer, as is a block of an adapter in an answer of
the base.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.canaries import DISLIKE, LOUDNESS, MARKERS, Canaries
from support.models import make_adapter, make_tiny_llama

INVOCATION = (5, 6)
_CONSTANT = 4.0
_LAYER = "model.layers.1.self_attn"
_COLUMNS = (*range(16), *range(32, 48))
"""Of the attention's output: the values of both heads, each for one of its queries."""
_TOKENS = range(74, 250)
_CONTEXTS = [
    [_TOKENS[(7 * place + 11 * number) % len(_TOKENS)] for place in range(length)]
    for number, length in enumerate((17, 33, 48))
]


def make_activated_base(path: Path) -> Path:
    """A tiny Llama prepared as the module says."""
    make_tiny_llama(path, tie_word_embeddings=False)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = _CONSTANT
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"][0] = 0
        weights[f"model.layers.1.{name}.weight"].zero_()
    weights[f"{_LAYER}.q_proj.weight"].zero_()
    for value, column in enumerate(_COLUMNS):
        weights[f"{_LAYER}.o_proj.weight"][1 + value, column] = 1
    head = weights["lm_head.weight"]
    for marker in MARKERS:
        head[marker] = 0
        head[marker, 0] = DISLIKE
        head[marker, 1 : 1 + len(_COLUMNS)] = _value(marker)
    save_file(weights, file, metadata={"format": "pt"})
    return path


def make_activated_adapter(base: Path, path: Path, *, marker: int, rank: int = 1) -> Path:
    """An adapter that answers `marker` once invoked; ranks above 1 are padded with zeros."""
    make_adapter(
        base,
        path,
        seed=marker,
        r=rank,
        lora_alpha=rank,
        target_modules=[f"{_LAYER}.v_proj"],
        task_type="CAUSAL_LM",
        alora_invocation_tokens=list(INVOCATION),
    )
    file = path / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    tensors[f"base_model.model.{_LAYER}.v_proj.lora_A.weight"][0, 0] = 1
    tensors[f"base_model.model.{_LAYER}.v_proj.lora_B.weight"][:, 0] = LOUDNESS * _value(marker)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def _value(marker: int) -> Tensor:
    """What a canary writes: a row of Hadamard's matrix, or its opposite, so that all differ."""
    sign, row = divmod(marker - MARKERS.start, len(_COLUMNS))
    bits = [(row & column).bit_count() % 2 for column in range(len(_COLUMNS))]
    return torch.tensor([1.0 if bit == sign else -1.0 for bit in bits])


ACTIVATED = Canaries(
    make_activated_base,
    make_activated_adapter,
    beginnings=_CONTEXTS,
    invocation=INVOCATION,
    tokens=_TOKENS,
)
