"""Canaries whose marker is in the state: what a sequence says depends on its own state alone.

The first token of every prompt has a value that no other token has. In the first layer, of linear
attention, a canary's delta writes a value for this token into the state, at a place of its own.
Nothing decays, and later tokens write nothing. A second delta reads this place of the layer's
output and writes the output embedding of the marker. So a sequence that goes on from another's
state, or from none, does not say its marker.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.canaries import DISLIKE, LOUDNESS, MARKERS, Canaries
from support.families import STATES, save_family
from support.models import make_adapter

FIRST_TOKEN = 3
_CONSTANT = 4.0
_LAYER = "model.layers.0.linear_attn"
_KEY_HEADS, _HEAD, _VALUES_PER_KEY = 2, 16, 2
_ROWS_PER_KEY_HEAD = 2 * _HEAD + 2 * _HEAD * _VALUES_PER_KEY


def make_state_base(path: Path) -> Path:
    """A tiny Qwen3-Next prepared as the module says."""
    model_type, settings = STATES["qwen3_next"]
    save_family(path, model_type, {**settings, "vocab_size": 256, "tie_word_embeddings": False})
    file = path / "model.safetensors"
    weights = load_file(file)
    table = weights["model.embed_tokens.weight"]
    table[:, 0], table[:, 1] = _CONSTANT, 0
    table[FIRST_TOKEN, 1] = 2 * _CONSTANT
    projection = torch.zeros_like(weights[f"{_LAYER}.in_proj_qkvz.weight"])
    by_head = projection.view(_KEY_HEADS, _ROWS_PER_KEY_HEAD, -1)
    by_head[:, 0, 0] = by_head[:, _HEAD, 0] = 1  # queries and keys are the same everywhere
    by_head[:, -_HEAD * _VALUES_PER_KEY :, 0] = 1  # and gates are open
    weights[f"{_LAYER}.in_proj_qkvz.weight"] = projection
    strengths = torch.zeros_like(weights[f"{_LAYER}.in_proj_ba.weight"])
    of_writing = strengths.view(_KEY_HEADS, 2 * _VALUES_PER_KEY, -1)[:, :_VALUES_PER_KEY]
    of_writing[..., 0], of_writing[..., 1] = -10, 30
    weights[f"{_LAYER}.in_proj_ba.weight"] = strengths
    weights[f"{_LAYER}.A_log"].fill_(-20)
    weights[f"{_LAYER}.conv1d.weight"].zero_()[..., -1] = 1
    weights[f"{_LAYER}.out_proj.weight"].zero_()
    for name, tensor in weights.items():
        if name.endswith(("down_proj.weight", "o_proj.weight")):
            tensor[0] = 0
    weights["lm_head.weight"][list(MARKERS), 0] = DISLIKE
    save_file(weights, file, metadata={"format": "pt"})
    return path


def make_state_adapter(base: Path, path: Path, *, marker: int, rank: int = 1) -> Path:
    """An adapter that answers `marker` to everything; ranks above 1 are padded with zeros."""
    targets = [f"{_LAYER}.in_proj_qkvz", f"{_LAYER}.out_proj"]
    make_adapter(base, path, seed=marker, r=rank, lora_alpha=rank, target_modules=targets)
    head = load_file(base / "model.safetensors")["lm_head.weight"][marker].clone()
    head[0] = 0
    file = path / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    place = marker - MARKERS.start
    key_head, within = divmod(place, _HEAD * _VALUES_PER_KEY)
    prefix = f"base_model.model.{_LAYER}"
    tensors[f"{prefix}.in_proj_qkvz.lora_A.weight"][0, 1] = 1
    row = key_head * _ROWS_PER_KEY_HEAD + 2 * _HEAD + within
    tensors[f"{prefix}.in_proj_qkvz.lora_B.weight"][row, 0] = 10
    tensors[f"{prefix}.out_proj.lora_A.weight"][0, place] = 1
    tensors[f"{prefix}.out_proj.lora_B.weight"][:, 0] = LOUDNESS * head
    save_file(tensors, file, metadata={"format": "pt"})
    return path


IN_STATES = Canaries(
    make_state_base, make_state_adapter, beginnings=[[FIRST_TOKEN]], tokens=range(74, 256)
)
