"""The quantized matrices of an MoE layer's experts, each part of all of them in one buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .expert_pairs import ExpertPairs
from .quantized_linear import multiply_dequantized
from .quantized_weight import QuantizedWeight, have_one_code


class ExpertParts(NamedTuple):
    """One expert's matrix in the layout of a device."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


class PackedExperts(nn.Module):
    """`[experts, out, in]`: matrices of one form. `forward(x, pairs)` multiplies each pair by its
    expert's matrix: `x [num_pairs, in]` to `[num_pairs, out]` in x's dtype.

    Only the experts of the pairs are read. Experts may differ in the order of their inputs
    (act-order), and in whether they have zero points.
    """

    codes: Tensor
    """`[experts, ...]`, as scale and zero."""
    scale: Tensor
    zero: Tensor | None
    table: Tensor | None
    order: Tensor | None
    """int64 `[experts, in]`."""

    def __init__(self, num_experts: int, form: QuantizedWeight) -> None:
        """form: one of the experts. Their values are set by `put`."""
        super().__init__()
        self.num_experts = num_experts
        self.out_features, self.in_features = form.shape
        self.code_type, self.group = form.code_type, form.group
        self._form = replace(form.rows(0, 0), order=None)
        parts = self.pack(form)
        self.register_buffer("codes", _room(num_experts, parts.codes))
        self.register_buffer("scale", _room(num_experts, parts.scale))
        self.register_buffer("zero", None)
        self.register_buffer("table", form.table)
        self.register_buffer("order", None)
        self._make_room(parts.zero, form.order)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[experts, out, in]`."""
        return self.num_experts, self.out_features, self.in_features

    @property
    def weight_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def accepts(self, matrix: QuantizedWeight) -> bool:
        """Whether the matrix has the form of these experts."""
        return (matrix.shape == self.shape[1:]) and have_one_code(matrix, self._form)

    def put(self, expert: int, matrix: QuantizedWeight) -> bool:
        """Set an expert's matrix; False if its form is not that of the others."""
        if not self.accepts(matrix):
            return False
        parts = self.pack(matrix)
        self._make_room(parts.zero, matrix.order)
        if not (_fits(parts.scale, self.scale) and _fits(parts.zero, self.zero)):
            return False
        self.codes[expert] = parts.codes
        self.scale[expert] = parts.scale
        if self.zero is not None and parts.zero is not None:
            self.zero[expert] = parts.zero
        if self.order is not None and matrix.order is not None:
            self.order[expert] = matrix.order
        return True

    def forward(self, x: Tensor, pairs: ExpertPairs) -> Tensor:
        if self.order is not None:
            x = x.gather(1, self.order[pairs.experts])
        return self.multiply(x, pairs)

    def multiply(self, x: Tensor, pairs: ExpertPairs) -> Tensor:
        """`forward` of inputs in the order of the codes."""
        raise NotImplementedError

    def pack(self, matrix: QuantizedWeight) -> ExpertParts:
        """The matrix in the layout that `multiply` reads, on its device."""
        raise NotImplementedError

    def _make_room(self, zero: Tensor | None, order: Tensor | None) -> None:
        """For the first zero points and the first order: other experts have zeros and inputs in
        their own order."""
        if zero is not None and self.zero is None:
            self.zero = zero.new_zeros(self.num_experts, *zero.shape)
        if order is not None and self.order is None:
            inputs = torch.arange(self.in_features, device=order.device)
            self.order = inputs.repeat(self.num_experts, 1)


class DequantizedExperts(PackedExperts):
    """Dequantizes a few rows of an expert at a time for each call, on any device.

    It serves where nothing faster does: on a CPU without a compiler. A code takes a byte.
    """

    def pack(self, matrix: QuantizedWeight) -> ExpertParts:
        return ExpertParts(matrix.codes, matrix.scale, matrix.zero)

    def multiply(self, x: Tensor, pairs: ExpertPairs) -> Tensor:
        y = x.new_empty(len(x), self.out_features)
        for expert, mine in pairs.runs:
            y[mine] = multiply_dequantized(x[mine], self._matrix(expert))
        return y

    def _matrix(self, expert: int) -> QuantizedWeight:
        zero = None if self.zero is None else self.zero[expert]
        return replace(self._form, codes=self.codes[expert], scale=self.scale[expert], zero=zero)


def _room(num_experts: int, part: Tensor) -> Tensor:
    """Uninitialized memory for such a part of each expert."""
    return part.new_empty(num_experts, *part.shape)


def _fits(part: Tensor | None, of_all: Tensor | None) -> bool:
    if part is None or of_all is None:
        return part is None
    return part.shape == of_all.shape[1:] and part.dtype == of_all.dtype
