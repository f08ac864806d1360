"""int8 and int4 weights on CUDA (weight-only), multiplied by activations of 16 or 32 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4_quantized import GROUP, group_norms, quantize_groups
from .int8_linear import quantize_weight
from .linear import Linear, row_norms
from .wna16_triton import dequantize_weights, multiply_quantized, pack_quantized

MAX_WNA16_ROWS = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 32}
"""The maximum rows for which codes are multiplied directly; beyond that, dequantizing the weight
costs less than PyTorch's matmul saves."""


class WNA16Linear(Linear):
    """W8A16 and W4A16: the same codes as on the CPU, unquantized activations, sums in fp32.

    8 bits have a scale per output channel, 4 bits one per channel and group of `GROUP` columns.
    With many rows the weight is rounded to the activations' dtype. Codes are stored group by group,
    with the words of a row's group together, so a kernel's tile is contiguous.
    """

    quantized: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, bits: int) -> None:
        quantized, scale, norms = _int8(weight) if bits == 8 else _int4(weight)
        super().__init__(*weight.shape, bias, norms)
        self.register_buffer("quantized", quantized)
        self.register_buffer("scale", scale)
        self.weight_bytes = quantized.nbytes + scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y = self._multiply(rows, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x.float(), None)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [n, in] @ weight.T + bias` in x's type."""
        if len(x) <= MAX_WNA16_ROWS[x.dtype]:
            return multiply_quantized(x, self.quantized, self.scale, bias)
        weight = dequantize_weights(self.quantized, self.scale, self.in_features, x.dtype)
        return F.linear(x, weight, bias)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words, fp32 scales `[1, out]` and the rows' lengths."""
    quantized, scale = quantize_weight(weight)
    norms = row_norms(quantized) * scale.flatten()
    groups = F.pad(quantized, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return pack_quantized(groups, 8), scale.T.contiguous(), norms


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words, bf16 scales `[groups, out]` and the rows' lengths."""
    quantized, scale = quantize_groups(weight)
    return pack_quantized(quantized, 4), scale.T.contiguous(), group_norms(quantized, scale)
