"""The base model's linear layers: how weights are stored and multiplied.

Each implementation takes a weight `[out, in]` and a bias `[out]` and stores them as its matmul
needs them. No row of the input changes the result of another row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PIECE_ROWS = 64


class Linear(nn.Module):
    """A linear layer of the frozen base: `forward(x [..., in]) -> [..., out]` in x's dtype."""

    weight_bytes: int
    """Bytes of the weight and its scales."""
    row_norms: Tensor
    """fp32 `[out]`: the norm of each row of the weight as it is multiplied."""

    def __init__(self, shape: Sequence[int], bias: Tensor | None, row_norms: Tensor) -> None:
        """shape: `[out, in]` of the weight."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias: Tensor | None
        self.register_buffer("bias", bias)
        self.register_buffer("row_norms", row_norms)

    def products(self, x: Tensor) -> Tensor:
        """`x [n, in] @ weight.T` without the bias: fp32 `[n, out]`, no less exact than forward."""
        raise NotImplementedError

    def erase(self) -> None:
        """Zero an unquantized weight and what belongs to it. It must not run any more."""
        for buffer in self.buffers():
            if buffer.is_mkldnn:
                # `zero_` writes an fp32 value for each of the weight's: past the end of bf16, and
                # not all that the layout pads.
                onednn = torch.ops.mkldnn
                ctypes.memset(onednn.data_ptr(buffer), 0, onednn._nbytes(buffer))
            else:
                buffer.zero_()


class QuantizedLinear(Linear):
    """A linear layer whose weight can be read row by row, as an embedding is."""

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Some rows of the weight, dequantized: fp32 `[n, in]` of `indices [n]`, int64. Nothing
        waits for the device."""
        raise NotImplementedError


class DenseLinear(Linear):
    """The unquantized weight, on any device."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape, bias, row_norms(weight))
        self.register_buffer("weight", weight)
        self.weight_bytes = weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def products(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).float()

    def refill(self, weights: Sequence[Tensor]) -> None:
        """Take over weights `[n, in]`, one below another, in the memory that is there."""
        rows = self.weight.split([len(each) for each in weights])
        for own, weight in zip(rows, weights, strict=True):
            own.copy_(weight)
        self.row_norms.copy_(row_norms(self.weight))


class PackedLinear(Linear):
    """The weight in the layout of oneDNN's own matmul, so that no call has to reorder it.

    CPU only. It serves bf16 where `bfloat16_linear_cpu.BFloat16PanelLinear` does not. On a CPU with
    AMX, it is 1.0 to 1.6 times as fast as DenseLinear up to 64 rows. It serves fp32 only where
    there is no compiler for `linear_cpu.PanelLinear`: on an AMD EPYC, where DenseLinear is MKL's
    matmul, it is 1.3 to 6 times as fast as that, most from 2 to 16 rows. With 512 inputs, rows
    computed together equal those computed alone to the bit.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape, bias, row_norms(weight))
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))
        self.weight_bytes = weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def products(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return y.float()


def row_norms(weight: Tensor) -> Tensor:
    """The length of each row of `weight [n, k]`: fp32 `[n]`. A few rows at a time become fp32."""
    norms = torch.empty(weight.shape[0], device=weight.device, dtype=torch.float32)
    for start in range(0, len(norms), _PIECE_ROWS):
        # Small results that live between pieces would keep the pieces' memory from being reused.
        own = slice(start, start + _PIECE_ROWS)
        norms[own] = weight[own].float().square().sum(dim=1)
    return norms.sqrt()
