"""The layout of a small base model, from the modules of its transformers class.

`layout_of` includes only the linear layers; `full_layout_of` includes everything that adapters can
change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex.adapters.layout import BaseLayout, Halves, Projection, Slice, SliceKind

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


def row_digests(weight: Tensor, number: int) -> list[str]:
    """Of all rows, of all but the last, and so on: see `BaseLayout.digests`."""
    rows = weight.detach().float().numpy()
    return [
        hashlib.sha256(rows[: len(rows) - missing].tobytes()).hexdigest()
        for missing in range(number)
    ]


def full_layout_of(base: Path, *, with_digests: bool = False) -> BaseLayout:
    """Embedding first, then linear layers, routers and experts, then the head."""
    model = AutoModelForCausalLM.from_pretrained(base)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    slices = [
        _embedding_slice(names[embedding], embedding),
        *(part for name, module in model.named_modules() for part in _slices(name, module, head)),
        Slice(names[head], head.in_features, head.out_features),
    ]
    digests = {names[module]: row_digests(module.weight, 1) for module in (embedding, head)}
    return BaseLayout(
        BASE_ID,
        tuple(Projection((part,)) for part in slices),
        ties_embeddings=bool(model.config.tie_word_embeddings),
        digests=digests if with_digests else {},
    )


def _embedding_slice(name: str, module: nn.Embedding) -> Slice:
    return Slice(name, module.num_embeddings, module.embedding_dim, SliceKind.EMBEDDING)


def _slices(name: str, module: nn.Module, head: nn.Module) -> Iterator[Slice]:
    part = None if module is head else _slice(name, module)
    if part is not None:
        yield part
    if isinstance(module, nn.Linear | Conv1D | nn.Embedding | PreTrainedModel):
        return
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3:
            num_experts, out_features, in_features = parameter.shape
            if getattr(module, "is_transposed", False):
                in_features, out_features = out_features, in_features
            path, halves = f"{name}.{leaf}", Halves.NONE
            if leaf == "gate_up_proj":
                halves = Halves.JOINED if module.is_concatenated else Halves.INTERLEAVED
            yield Slice(
                path, in_features, out_features, SliceKind.EXPERTS, num_experts, halves=halves
            )
        elif parameter.ndim == 2 and leaf == "weight":
            yield Slice(name, parameter.shape[1], parameter.shape[0])


def _slice(name: str, module: nn.Module) -> Slice | None:
    if isinstance(module, nn.Linear):
        return Slice(name, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return Slice(name, module.weight.shape[0], module.weight.shape[1])
    return None


def _are_siblings(one: str, other: str) -> bool:
    (parent, _, last), (other_parent, _, other_last) = one.rpartition("."), other.rpartition(".")
    return parent == other_parent and any({last, other_last} <= group for group in FUSED)
