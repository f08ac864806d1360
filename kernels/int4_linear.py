"""int4 weights on the CPU, multiplied by PyTorch's packed int4 kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4_quantized import GROUP, group_norms, quantize_groups
from .linear import Linear

_OUT_MULTIPLE = 16
"""Rows of the weight that PyTorch packs together."""
_PIECE_ROWS = 256
"""Rows that are packed at a time: a multiple of PyTorch's blocks on every processor. PyTorch takes
the codes as int32, which take eight times the bytes of the packed ones."""
_OFFSET = 8
"""PyTorch's codes are unsigned."""


class Int4Linear(Linear):
    """W4A16: int4 weights with a scale per group of columns, activations in bf16.

    The products are those of `int4_quantized`, rounded to bf16 whatever x's type is: for others
    PyTorch has a loop in plain C++ only, a hundred times as slow. CPU only.
    """

    weight: Tensor
    scales_and_zeros: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        quantized, scale = quantize_groups(weight)
        norms = group_norms(quantized, scale)
        super().__init__(weight, bias, norms)
        missing = -self.out_features % _OUT_MULTIPLE
        scales = F.pad(scale, (0, 0, 0, missing)).T
        packed = [_pack(rows.flatten(1)) for rows in quantized.split(_PIECE_ROWS)]
        self.register_buffer("weight", torch.cat(packed))
        zeros = torch.zeros_like(scales)
        self.register_buffer("scales_and_zeros", torch.stack([scales, zeros], dim=2).contiguous())
        self.weight_bytes = self.weight.nbytes + self.scales_and_zeros.nbytes

    def forward(self, x: Tensor) -> Tensor:
        result = self._multiply(x.reshape(-1, self.in_features)).to(x.dtype)
        if self.bias is not None:
            result += self.bias
        return result.view(*x.shape[:-1], self.out_features)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x).float()

    def _multiply(self, x: Tensor) -> Tensor:
        """bf16 `x [n, in] @ weight.T`."""
        x = F.pad(x.bfloat16(), (0, -self.in_features % GROUP))
        factors = (self.weight, GROUP, self.scales_and_zeros)
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, *factors)
        return result[:, : self.out_features].contiguous()


def _pack(quantized: Tensor) -> Tensor:
    """Codes `[n, in]` as PyTorch's kernel takes them, n rounded up to its multiple."""
    missing = -len(quantized) % _OUT_MULTIPLE
    raised = F.pad(quantized.int() + _OFFSET, (0, 0, 0, missing), value=_OFFSET)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(raised, 1)
    return packed
