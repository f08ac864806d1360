"""Chooses the implementation of an MoE layer's experts by device and form of their matrices."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import chain

from torch import Tensor

from .packed_experts import DequantizedExperts, PackedExperts
from .packed_experts_cpu import PanelExperts
from .quantized_linear_cpu import serves_quantized
from .quantized_weight import QuantizedWeight
from .wna16_experts import WNA16Experts
from .wna16_weight import has_served_groups


class ExpertsKind(StrEnum):
    """The implementations: a function, or the names of classes."""

    DENSE = "grouped_linear"
    PANEL = "PanelExperts"
    DEQUANTIZED = "DequantizedExperts"
    WNA16 = "WNA16Experts"


def choose_experts(form: Tensor | QuantizedWeight, device_type: str) -> ExpertsKind:
    """The form that `pack_experts` gives experts on a device of this type, all of the form of one.

    Its values are not read.
    """
    if isinstance(form, Tensor):
        return ExpertsKind.DENSE
    if device_type == "cuda":
        return ExpertsKind.WNA16 if has_served_groups(form) else ExpertsKind.DENSE
    is_served = device_type == "cpu" and serves_quantized(form)
    return ExpertsKind.PANEL if is_served else ExpertsKind.DEQUANTIZED


def pack_experts(
    matrices: Iterable[Tensor | QuantizedWeight],
    num_experts: int,
    *,
    device_type: str,
) -> PackedExperts | None:
    """The experts of these matrices `[out, in]`, all on a device of this type; None if they are
    not all quantized in one form, or in none that is multiplied there.

    Each is packed before the next is read.
    """
    rest = iter(matrices)
    first = next(rest)
    packed = empty_experts(first, num_experts, device_type=device_type)
    if packed is None:
        return None
    for expert, matrix in enumerate(chain((first,), rest)):
        if isinstance(matrix, Tensor) or not packed.put(expert, matrix):
            return None
    return packed


def empty_experts(
    form: Tensor | QuantizedWeight, num_experts: int, *, device_type: str
) -> PackedExperts | None:
    """Experts of this form without values, on the form's device, as `choose_experts` says; None if
    they stay dense."""
    if isinstance(form, Tensor):
        return None
    match choose_experts(form, device_type):
        case ExpertsKind.PANEL:
            return PanelExperts(num_experts, form)
        case ExpertsKind.DEQUANTIZED:
            return DequantizedExperts(num_experts, form)
        case ExpertsKind.WNA16:
            return WNA16Experts(num_experts, form)
        case _:
            return None
