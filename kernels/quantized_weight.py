"""A quantized weight as every format is converted to: codes, scales, zero points.

    W[o, i] = (value(codes[o, i]) - zero[o, i // group]) × scale[o, i // group]

It is the form between a checkpoint and a device. Each device packs it into its own layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

_PIECE_ROWS = 64


class CodeType(StrEnum):
    """How a code stands for a number."""

    INT8 = "int8"
    """-128 to 127."""
    INT4 = "int4"
    """-8 to 7."""
    FP8 = "fp8"
    """The bits of a `float8_e4m3fn`, in an int8."""
    TABLE4 = "table4"
    """0 to 15: an index into a table of 16 numbers."""

    @property
    def bits(self) -> int:
        """Bits of a code as it is kept on a device."""
        return 4 if self in (CodeType.INT4, CodeType.TABLE4) else 8

    @property
    def is_integer(self) -> bool:
        """Whether a code is its number itself."""
        return self in (CodeType.INT8, CodeType.INT4)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix `[out, in]` in any format."""

    code_type: CodeType
    codes: Tensor
    """int8 `[out, in]`, a code in each byte."""
    scale: Tensor
    """`[out, groups]`, fp32, bf16 or fp16 as the format stores it."""
    group: int
    """Columns that share a scale; the last group may have fewer."""
    zero: Tensor | None = None
    """`[out, groups]`: int8, or fp32 where zero points are no integers; None: all are 0."""
    table: Tensor | None = None
    """fp32 `[16]`, with `TABLE4` alone."""
    order: Tensor | None = None
    """int64 `[in]`: the input that column i multiplies is `order[i]`. None: input i.

    GPTQ's act-order sorts inputs by importance, so that a group has inputs of the same importance.
    """
    num_filling: int = 0
    """Columns that stand for zero, each of an input that has another one; see `quantized_part`."""

    def __post_init__(self) -> None:
        groups = -(-self.codes.shape[1] // self.group)
        assert self.scale.shape == (len(self.codes), groups), "a scale for each row and group"
        assert self.zero is None or self.zero.shape == self.scale.shape
        assert (self.table is not None) == (self.code_type is CodeType.TABLE4)

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.codes.shape

    @property
    def num_inputs(self) -> int:
        """The inputs that it multiplies."""
        return self.shape[1] - self.num_filling

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """The rows from `start` to before `end`, as views."""
        zero = None if self.zero is None else self.zero[start:end]
        codes, scale = self.codes[start:end], self.scale[start:end]
        return replace(self, codes=codes, scale=scale, zero=zero)

    def fill(self, rows: QuantizedWeight) -> None:
        """Write the codes and scales of as many rows of the same form into this weight."""
        assert _have_one_form(self, rows), "rows of another form"
        self.codes.copy_(rows.codes)
        self.scale.copy_(rows.scale)
        if self.zero is not None and rows.zero is not None:
            self.zero.copy_(rows.zero)

    def pick(self, indices: Tensor) -> QuantizedWeight:
        """The rows with these indices, int64 `[n]`."""
        zero = None if self.zero is None else self.zero[indices]
        return replace(self, codes=self.codes[indices], scale=self.scale[indices], zero=zero)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on this device."""
        tensors = {
            name: tensor.to(device)
            for name in ("codes", "scale", "zero", "table", "order")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **tensors)

    def values(self) -> Tensor:
        """fp32 `[out, in]`: the numbers of the codes, without zero points and scales."""
        if self.code_type is CodeType.FP8:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.table is not None:
            return self.table[self.codes.int()]
        return self.codes.float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[out, in]`, inputs in their own order; computed in fp32 and rounded once to dtype."""
        shape = (self.shape[0], self.num_inputs)
        weight = torch.zeros(shape, dtype=dtype, device=self.codes.device)
        for start in range(0, len(weight), _PIECE_ROWS):
            rows = weight[start : start + _PIECE_ROWS]
            numbers = self.rows(start, start + _PIECE_ROWS)._numbers().to(dtype)
            if self.order is None:
                rows.copy_(numbers)
            else:
                rows.index_add_(1, self.order, numbers)
        return weight

    def row_norms(self) -> Tensor:
        """fp32 `[out]`: the length of each row of the dequantized weight."""
        pieces = [
            self.rows(start, start + _PIECE_ROWS)._numbers().square().sum(dim=1)
            for start in range(0, len(self.codes), _PIECE_ROWS)
        ]
        return torch.cat(pieces).sqrt()

    def _numbers(self) -> Tensor:
        """fp32 `[out, in]`, the inputs in the order of the codes."""
        numbers = self.values()
        if self.zero is not None:
            numbers = numbers - self._by_column(self.zero)
        return numbers * self._by_column(self.scale)

    def _by_column(self, by_group: Tensor) -> Tensor:
        """fp32 `[out, in]` of `[out, groups]`."""
        repeated = by_group.float().repeat_interleave(self.group, dim=1)
        return repeated[:, : self.codes.shape[1]]


def empty_rows(form: QuantizedWeight, num_rows: int) -> QuantizedWeight:
    """A weight of so many rows of this form, for `fill`: codes, scales and zero points have no
    values yet."""

    def empty(rows: Tensor) -> Tensor:
        return rows.new_empty(num_rows, rows.shape[1])

    zero = None if form.zero is None else empty(form.zero)
    return replace(form, codes=empty(form.codes), scale=empty(form.scale), zero=zero)


def stack_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The parts below one another; None unless they are of one format and order."""
    first = parts[0]
    if not all(_have_one_form(first, part) for part in parts[1:]):
        return None
    codes = torch.cat([part.codes for part in parts])
    scale = torch.cat([part.scale for part in parts])
    zeros = [part.zero for part in parts if part.zero is not None]
    return replace(first, codes=codes, scale=scale, zero=torch.cat(zeros) if zeros else None)


def have_one_code(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether codes and scales of both mean the same, whatever their zero points and orders."""
    return (first.code_type, first.group, first.scale.dtype) == (
        other.code_type,
        other.group,
        other.scale.dtype,
    ) and _are_equal(first.table, other.table)


def _have_one_form(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    return (
        have_one_code(first, other)
        and _dtype(first.zero) == _dtype(other.zero)
        and _are_equal(first.order, other.order)
    )


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _are_equal(first: Tensor | None, other: Tensor | None) -> bool:
    if first is other or first is None or other is None:
        return first is other
    return torch.equal(first, other)
