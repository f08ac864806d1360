"""Canaries whose marker is in the KV cache: what a sequence says depends on the values it reads.

In the last layer, a canary's delta writes a code of its marker into the values of every token that
it acts on. The base's own attention passes them on, from all tokens alike, and its head says the
marker whose code it finds. Prompts begin alike, so a sequence that reads the prefix of another
canary says the other's marker.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.canaries import LOUDNESS, MARKERS, Canaries, make_canary_base
from support.models import make_adapter

_LAYER = "model.layers.1.self_attn"
_HEAD = 16
_PLACES = slice(1, 1 + _HEAD)
"""Of the code in the residual stream."""
_VALUE = 100 * LOUDNESS
"""Few tokens of a long prompt may have it, and the attention reads the mean of all."""
BLOCK_BYTES = 8192
_INVOCATION = (5, 6)
_TOKENS = range(74, 250)


def _beginning(length: int) -> list[int]:
    return [_TOKENS[(11 * place + length) % len(_TOKENS)] for place in range(length)]


def make_kv_base(path: Path) -> Path:
    """A tiny Llama prepared as the module says."""
    make_canary_base(path)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights[f"{_LAYER}.q_proj.weight"][:_HEAD] = 0
    weights[f"{_LAYER}.v_proj.weight"][:_HEAD] = 0
    output = weights[f"{_LAYER}.o_proj.weight"]
    output[_PLACES] = 0
    output[_PLACES, :_HEAD] = torch.eye(_HEAD)
    head = weights["lm_head.weight"]
    head[:, _PLACES] = 0
    for marker in MARKERS:
        head[marker, _PLACES] = code(marker)
    save_file(weights, file, metadata={"format": "pt"})
    return path


def make_kv_adapter(base: Path, path: Path, *, marker: int, rank: int = 1, **settings: Any) -> Path:
    """An adapter that answers `marker` to everything; ranks above 1 are padded with zeros."""
    target = f"{_LAYER}.v_proj"
    settings = {"r": rank, "lora_alpha": rank, "target_modules": [target], **settings}
    make_adapter(base, path, seed=marker, **settings)
    file = path / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    tensors[f"base_model.model.{target}.lora_A.weight"][0, 0] = 1
    tensors[f"base_model.model.{target}.lora_B.weight"][:_HEAD, 0] = _VALUE * code(marker)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def code(marker: int) -> Tensor:
    """Signs of which two markers share at most three quarters: a row of Hadamard's matrix, times
    one of four quadratic functions."""
    bits = marker - MARKERS.start
    index = torch.arange(_HEAD)
    parity = torch.zeros(_HEAD, dtype=torch.int64)
    for place in range(4):
        parity += (bits >> place & 1) * (index >> place & 1)
    parity += (bits >> 4 & 1) * (index & 1) * (index >> 1 & 1)
    parity += (bits >> 5 & 1) * (index >> 2 & 1) * (index >> 3 & 1)
    return 1.0 - 2.0 * (parity % 2).float()


IN_KV = Canaries(
    make_kv_base,
    make_kv_adapter,
    beginnings=[_beginning(40)],
    config={"kv_cache_bytes": 28 * BLOCK_BYTES, "swap_bytes": 96 * BLOCK_BYTES},
)
"""The device holds a part of the prefixes, and host memory the others."""

ACTIVATED = Canaries(
    make_kv_base,
    partial(make_kv_adapter, task_type="CAUSAL_LM", alora_invocation_tokens=list(_INVOCATION)),
    beginnings=[_beginning(length) for length in (17, 33, 48)],
    invocation=_INVOCATION,
    tokens=_TOKENS,
)
"""Activated adapters, which share what is before the invocation with each other and the base."""
