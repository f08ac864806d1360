"""Linear layers in fp32 on the CPU, multiplied by the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library
from .linear import Linear, row_norms

_PANEL = 16
"""PANEL of `cpu/linear.h`."""
_PIECE_ROWS = 64
"""Rows that are packed at a time: a multiple of the panel."""


class PanelLinear(Linear):
    """The weight in panels of 16 outputs, multiplied in fp32.

    A weight whose values bf16 holds exactly is stored in bf16: half the memory, and a step of few
    rows takes as long as reading it. Most checkpoints are published in bf16. The bits of a row do
    not depend on the rows that are computed with it.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Reads no more of the weight than slices of a few rows at a time."""
        super().__init__(weight.shape, None if bias is None else bias.float(), row_norms(weight))
        self.register_buffer("weight", _packed(weight))
        self.weight_bytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias).to(x.dtype)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x, None)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [..., in]` to fp32 `[..., out]`."""
        function = cpu_library.function("linear", self.weight.dtype)
        assert function is not None
        assert x.shape[-1] == self.in_features
        x = x.float().contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        function(
            *(x.data_ptr(), self.weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(y.data_ptr(), x.numel() // self.in_features, self.in_features, self.out_features),
            torch.get_num_threads(),
        )
        return y


def serves_linear(dtype: torch.dtype) -> bool:
    """Whether `PanelLinear` serves weights of this dtype on the CPU."""
    return cpu_library.function("linear", dtype) is not None


def _packed(weight: Tensor) -> Tensor:
    """`weight [out, in]` as `[ceil(out / 16), in, 16]`, with zeros after the last row."""
    dtype = torch.bfloat16 if _is_exact_in_bfloat16(weight) else torch.float32
    num_rows, in_features = weight.shape
    packed = torch.empty(-(-num_rows // _PANEL), in_features, _PANEL, dtype=dtype)
    for start in range(0, len(packed), _PIECE_ROWS // _PANEL):
        panels = packed[start : start + _PIECE_ROWS // _PANEL]
        rows = weight[start * _PANEL : (start + len(panels)) * _PANEL]
        whole = F.pad(rows, (0, 0, 0, len(panels) * _PANEL - len(rows)))
        panels.copy_(whole.view(len(panels), _PANEL, -1).transpose(1, 2))
    return packed


def _is_exact_in_bfloat16(weight: Tensor) -> bool:
    pieces = (weight[start : start + 256] for start in range(0, weight.shape[0], 256))
    return all(torch.equal(rows, rows.bfloat16().to(rows.dtype)) for rows in pieces)
