"""Linear layers with quantized weights, by PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .linear import QuantizedLinear
from .quantized_weight import QuantizedWeight

_PIECE_ROWS = 256


class DequantizedLinear(QuantizedLinear):
    """Dequantizes a few rows of the weight at a time for each call, on any device.

    It serves where nothing faster does: on a CPU without a compiler. A code takes a byte.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape, bias, weight.row_norms())
        self.weight = weight
        stored = (weight.codes, weight.scale, weight.zero, weight.table, weight.order)
        self.weight_bytes = sum(tensor.nbytes for tensor in stored if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.products(x)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)

    def products(self, x: Tensor) -> Tensor:
        return multiply_dequantized(x, self.weight)

    def weight_rows(self, indices: Tensor) -> Tensor:
        return self.weight.pick(indices).dequantize()


def multiply_dequantized(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """`x [..., in] @ weight.T`: fp32 `[..., out]`."""
    x = x.float()
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], _PIECE_ROWS):
        piece = weight.rows(start, start + _PIECE_ROWS).dequantize()
        y[..., start : start + _PIECE_ROWS] = F.linear(x, piece)
    return y
