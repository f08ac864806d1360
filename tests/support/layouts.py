"""The layout of a small base model, from the modules of its transformers class."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from loraplex.adapters.layout import BaseLayout, Projection, Slice

FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
BASE_ID = "sha256:" + "b" * 64


def layout_of(base: Path) -> BaseLayout:
    """Every linear layer of the model but the head, siblings of one input fused."""
    model = AutoModelForCausalLM.from_pretrained(base)
    projections: list[list[Slice]] = []
    for name, module in model.named_modules():
        part = _slice(name, module)
        if part is None or name == "lm_head":
            continue
        if projections and _are_siblings(projections[-1][-1].name, name):
            projections[-1].append(part)
        else:
            projections.append([part])
    refused = {"lm_head": "the head carries no adapters"}
    return BaseLayout(BASE_ID, tuple(Projection(tuple(parts)) for parts in projections), refused)


def _slice(name: str, module: torch.nn.Module) -> Slice | None:
    if isinstance(module, torch.nn.Linear):
        return Slice(name, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return Slice(name, module.weight.shape[0], module.weight.shape[1])
    return None


def _are_siblings(one: str, other: str) -> bool:
    (parent, _, last), (other_parent, _, other_last) = one.rpartition("."), other.rpartition(".")
    return parent == other_parent and any({last, other_last} <= group for group in FUSED)
