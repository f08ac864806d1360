"""Adapters whose every answer names them: isolation is seen without a reference run.

In the canary base, dimension 0 of the residual stream holds the same positive constant at every
position, and the last layer's attention passes it on as its first value. A canary's rank-1 delta on
that layer's `o_proj` reads it and writes the output embedding of its marker, far louder than
everything else. The head's rows of all marker candidates dislike dimension 0, so the base, where
nothing drowns it, never says a marker.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.models import make_adapter, make_tiny_llama

MARKERS = range(10, 74)
_CONSTANT = 4.0
_DISLIKE = -100.0
_LOUDNESS = 1000.0
_TARGET = "model.layers.1.self_attn.o_proj"


def make_canary_base(path: Path) -> Path:
    """A tiny Llama prepared as the module says."""
    make_tiny_llama(path, tie_word_embeddings=False)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = _CONSTANT
    for layer in (0, 1):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0
        weights[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0
    value = weights["model.layers.1.self_attn.v_proj.weight"]
    value[0] = 0
    value[0, 0] = 1
    weights["lm_head.weight"][list(MARKERS), 0] = _DISLIKE
    save_file(weights, file, metadata={"format": "pt"})
    return path


def make_canary_adapter(base: Path, path: Path, *, marker: int, rank: int = 1) -> Path:
    """An adapter that answers `marker` to everything; ranks above 1 are padded with zeros."""
    make_adapter(base, path, seed=marker, r=rank, lora_alpha=rank, target_modules=[_TARGET])
    head = load_file(base / "model.safetensors")["lm_head.weight"][marker].clone()
    head[0] = 0
    file = path / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    tensors[f"base_model.model.{_TARGET}.lora_A.weight"][0, 0] = 1
    tensors[f"base_model.model.{_TARGET}.lora_B.weight"][:, 0] = _LOUDNESS * head
    save_file(tensors, file, metadata={"format": "pt"})
    return path
