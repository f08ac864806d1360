"""The layout in which `wna16_triton` reads a quantized weight.

The columns lie in units. A row's words of a unit lie together, so a kernel's tile is contiguous.
Word i of a unit holds the codes of columns i, i + words, ... from its lowest bits on: one for each
part of the unit, and a part's columns are adjacent. A unit has at most 128 columns, and so few that
no part has two scales:

    group    8 bits, 2 parts          4 bits, 4 parts
    16       32 columns, 16 a part    64 columns, 16 a part
    32       64 columns, 32 a part    128 columns, 32 a part, a scale for each
    64       128 columns, 64 a part   128 columns, 32 a part, a scale for two
    128      128 columns, one scale   128 columns, one scale
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantized_weight import CodeType, QuantizedWeight

WORD_BITS = 16
"""Codes are stored in words as wide as the numbers they are converted to, so no byte is moved."""
MAX_UNIT = 128
MIN_PART = 16
"""Columns of the smallest product on tensor cores."""


@dataclass(frozen=True, slots=True)
class WNA16Weight:
    """A matrix `[out, in]`; inputs are in the order of the codes."""

    code_type: CodeType
    words: Tensor
    """int16 `[units, out, words]`; codes beyond `in` are 0."""
    scale: Tensor
    """fp32, bf16 or fp16 `[groups, out]`, of all groups of all units; `[1, out]` without group."""
    zero: Tensor | None
    """int8 or fp32, like scale."""
    table: Tensor | None
    """fp32 `[16]`."""
    group: int | None
    """16, 32, 64 or 128 columns; None: a row has one scale and no zero point."""
    in_features: int

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    @property
    def num_units(self) -> int:
        return len(self.words)

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return self.words.shape[2] * (WORD_BITS // self.code_type.bits)

    @property
    def num_bytes(self) -> int:
        tensors = (self.words, self.scale, self.zero, self.table)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def has_served_groups(weight: QuantizedWeight) -> bool:
    """Whether this layout represents its groups."""
    group = _group_of(weight)
    return group is None or group >= MIN_PART


def pack_codes(weight: QuantizedWeight) -> WNA16Weight:
    """The weight in this layout, made on its device. Its groups must be served."""
    assert has_served_groups(weight), "groups of a multiple of 16 columns, or one for the row"
    group = _group_of(weight)
    num_parts = WORD_BITS // weight.code_type.bits
    unit = min(MAX_UNIT, (group or MAX_UNIT) * num_parts)
    num_units = -(-weight.shape[1] // unit)
    num_groups = 1 if group is None else num_units * unit // group

    def by_group(stored: Tensor) -> Tensor:
        """`[num_groups, out]`, a larger group repeated, and zeros for those without columns."""
        if group is not None and weight.group < weight.shape[1]:
            stored = stored.repeat_interleave(weight.group // group, dim=1)[:, :num_groups]
        elif group is not None:
            stored = stored.expand(-1, num_groups)
        return F.pad(stored, (0, num_groups - stored.shape[1])).T.contiguous()

    return WNA16Weight(
        weight.code_type,
        _words(weight.codes, num_units, unit, num_parts),
        by_group(weight.scale),
        None if weight.zero is None else by_group(weight.zero),
        weight.table,
        group,
        weight.shape[1],
    )


def pick_rows(weight: WNA16Weight, indices: Tensor) -> QuantizedWeight:
    """The rows with these indices, int64 `[n]`, in the common form."""
    bits, in_features = weight.code_type.bits, weight.in_features
    group = weight.group or in_features
    words = weight.words[:, indices]
    parts = [words >> shift & ((1 << bits) - 1) for shift in range(0, WORD_BITS, bits)]
    codes = torch.stack(parts, dim=2).flatten(2).transpose(0, 1).flatten(1)[:, :in_features]
    if weight.code_type is CodeType.INT4:
        codes = (codes ^ 8) - 8  # the highest bit is the sign
    num_groups = -(-in_features // group)

    def by_row(stored: Tensor) -> Tensor:
        return stored[:num_groups, indices].T

    return QuantizedWeight(
        weight.code_type,
        codes.to(torch.int8),
        by_row(weight.scale),
        group,
        zero=None if weight.zero is None else by_row(weight.zero),
        table=weight.table,
    )


def served_group(group: int, in_features: int, *, has_zeros: bool) -> int | None:
    """Columns of a stored scale of a weight with such groups: the most that divide a group and a
    unit; see `WNA16Weight.group`."""
    if group < in_features:
        return gcd(group, MAX_UNIT)
    return MAX_UNIT if has_zeros else None


def _group_of(weight: QuantizedWeight) -> int | None:
    return served_group(weight.group, weight.shape[1], has_zeros=weight.zero is not None)


def _words(codes: Tensor, num_units: int, unit: int, num_parts: int) -> Tensor:
    """int16 `[num_units, out, unit / num_parts]` of int8 `[out, in]`."""
    codes = F.pad(codes, (0, num_units * unit - codes.shape[1]))
    parts = codes.reshape(len(codes), num_units, num_parts, -1).transpose(0, 1).unbind(dim=2)
    words = torch.zeros(parts[0].shape, dtype=torch.int16, device=codes.device)
    bits = WORD_BITS // num_parts
    for place, part in enumerate(parts):
        words |= (part.to(torch.int16) & ((1 << bits) - 1)) << (place * bits)
    return words
