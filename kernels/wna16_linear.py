"""Quantized weights on CUDA (weight-only), multiplied by activations of 16 or 32 bits."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import DenseLinear, Linear, QuantizedLinear
from .quantized_weight import QuantizedWeight
from .wna16_triton import dequantize_weight, multiply_quantized
from .wna16_weight import has_served_groups, pack_codes, pick_rows

MAX_WNA16_ROWS = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 32}
"""The maximum rows for which codes are multiplied directly; beyond that, dequantizing the weight
costs less than PyTorch's matmul saves."""


class WNA16Linear(QuantizedLinear):
    """The codes of any quantized weight, unquantized activations, sums in fp32.

    A table's numbers are rounded to the activations' dtype. With many rows the whole weight is
    rounded to it.
    """

    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        """weight: its groups must be served, see `wna16_weight`."""
        super().__init__(weight.shape, bias, weight.row_norms())
        self.packed = pack_codes(weight)
        self.register_buffer("order", weight.order)
        self.weight_bytes = self.packed.num_bytes
        if weight.order is not None:
            self.weight_bytes += weight.order.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y = self._multiply(rows, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x.float(), None)

    def weight_rows(self, indices: Tensor) -> Tensor:
        rows = pick_rows(self.packed, indices)
        return replace(rows, order=self.order).dequantize()

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [n, in] @ weight.T + bias` in x's type."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if len(x) <= MAX_WNA16_ROWS[x.dtype]:
            return multiply_quantized(x, self.packed, bias)
        return F.linear(x, dequantize_weight(self.packed, x.dtype), bias)


def pack_wna16(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer of this weight for activations of dtype: dense if its groups are not served."""
    if has_served_groups(weight):
        return WNA16Linear(weight, bias)
    return DenseLinear(weight.dequantize(dtype), bias)
