"""Names of experts' matrices in adapters whose experts PEFT does not wrap as stacked parameters.

Before version 5, transformers had one module per expert, and PEFT named its matrices
`…mlp.experts.3.gate_proj`. Other trainers stack the experts of a layer in one tensor, named after
one of these modules (`…mlp.experts.gate_proj`, `…mlp.experts.w1`) or after the parameter
(`…mlp.experts.gate_up_proj`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from .layout import BaseLayout, Halves, layer_path

_BLOCKS = ("block_sparse_moe", "mlp", "feed_forward")
_EXPERTS = ".experts."
_NUMBER = re.compile(r"\.experts\.[0-9]+\.")
_ANY_NUMBER = ".experts.*."


class Half(StrEnum):
    """The outputs of a slice that one of its matrices computes."""

    WHOLE = "whole"
    GATE = "gate"
    UP = "up"


class ExpertMatrix(NamedTuple):
    """What a module's name means."""

    slice_index: int
    half: Half
    expert: int | None
    """None: the tensor is for all experts."""


_PARTS = {
    "gate_proj": ("gate_up_proj", Half.GATE),
    "w1": ("gate_up_proj", Half.GATE),
    "up_proj": ("gate_up_proj", Half.UP),
    "w3": ("gate_up_proj", Half.UP),
    "w2": ("down_proj", Half.WHOLE),
}
"""Last name to the parameter that holds the matrix now, and its outputs there."""
_WITHOUT_GATE = {"w1": "up_proj", "w2": "down_proj"}


def find_expert_matrix(module: str, layout: BaseLayout) -> ExpertMatrix | None:
    """The experts' matrix that `module` means; None: it names none of this base's."""
    block, separator, path = module.rpartition(_EXPERTS)
    number, _, leaf = path.rpartition(".")
    if not separator or (number and (not number.isdecimal() or str(int(number)) != number)):
        return None
    experts = current_name(f"{block}{_EXPERTS[:-1]}", layout)
    if experts not in layout.expert_modules:
        return None
    parameter, half = leaf, Half.WHOLE
    if f"{experts}.{leaf}" not in layout.slice_index:
        parameter, half = _PARTS.get(leaf, (leaf, half))
        if f"{experts}.{parameter}" not in layout.slice_index:
            parameter, half = _WITHOUT_GATE.get(leaf, leaf), Half.WHOLE
    index = layout.slice_index.get(f"{experts}.{parameter}")
    if index is None or (half is not Half.WHOLE and not layout.slices[index].halves):
        return None
    return ExpertMatrix(index, half, int(number) if number else None)


def current_name(module: str, layout: BaseLayout) -> str:
    """The path of a module whose decoder layer names the block with its experts otherwise, such as
    `block_sparse_moe` before version 5; other paths are unchanged."""
    layer = layer_path(module)
    block, _, rest = module.removeprefix(f"{layer}.").partition(".")
    experts = layout.experts_of_layer.get(layer, "")
    current = experts.rpartition(".")[0]
    if block not in _BLOCKS or module.startswith(f"{current}."):
        return module
    return f"{current}.{rest}" if current else module


def columns_of(half: Half, halves: Halves, out_features: int) -> tuple[int, int, int]:
    """The number, the first and the step of a half's outputs among those of its slice."""
    if half is Half.WHOLE:
        return out_features, 0, 1
    width, is_up = out_features // 2, half is Half.UP
    if halves is Halves.INTERLEAVED:
        return width, int(is_up), 2
    return width, width * is_up, 1


def without_expert(name: str) -> str:
    """The name with `*` in place of the expert's number."""
    return _NUMBER.sub(_ANY_NUMBER, name)


def with_expert(name: str, expert: int) -> str:
    """The inverse of `without_expert`."""
    return name.replace(_ANY_NUMBER, f"{_EXPERTS}{expert}.")
