"""Linear layers with quantized weights on the CPU, multiplied in fp32 by the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library
from .linear import Linear
from .quantized_weight import CodeType, QuantizedWeight

_PANEL = 16
"""PANEL of `cpu/linear.h`."""
_PIECE_ROWS = 64
"""Rows that are packed at a time: a multiple of the panel."""
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}
"""`Kind` of `cpu/quantized_linear.h`."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A quantized matrix `[out, in]` in panels of 16 outputs; inputs are in the order of the codes.

    Two codes of 4 bits share a byte.
    """

    code_type: CodeType
    shape: tuple[int, int]
    """`[out, in]`."""
    group: int
    codes: Tensor
    """int8 `[panels, in, 16]`, with 4 bits `[panels, ceil(in / 2), 16]`."""
    scale: Tensor
    """`[panels, groups, 16]`."""
    zero: Tensor | None
    """Like scale."""
    table: Tensor | None

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scale, self.zero, self.table)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class QuantizedPanelLinear(Linear):
    """Codes in panels of 16 outputs, which become fp32 numbers while they are multiplied.

    The bits of a row do not depend on the rows that are computed with it.
    """

    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.float()
        super().__init__(weight.shape, bias, weight.row_norms())
        self.panels = pack_panels(weight)
        self.register_buffer("order", weight.order)
        self.weight_bytes = self.panels.num_bytes
        if weight.order is not None:
            self.weight_bytes += weight.order.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias).to(x.dtype)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x, None)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [..., in]` to fp32 `[..., out]`."""
        x = x.float() if self.order is None else x.float().index_select(-1, self.order)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        multiply_panels(x.contiguous(), self.panels, bias, y)
        return y


def pack_panels(weight: QuantizedWeight) -> Panels:
    """The weight in panels."""
    out_features, in_features = weight.shape
    return Panels(
        weight.code_type,
        (out_features, in_features),
        weight.group,
        _packed_codes(weight),
        _in_panels(weight.scale),
        None if weight.zero is None else _in_panels(weight.zero),
        weight.table,
    )


def multiply_panels(x: Tensor, panels: Panels, bias: Tensor | None, y: Tensor) -> None:
    """Set y, `[..., out]`, to `x [..., in] @ W.T + bias`; all fp32 and contiguous."""
    function = cpu_library.function("quantized_linear", panels.code_type)
    assert function is not None
    out_features, in_features = panels.shape
    scale, zero = panels.scale, panels.zero
    function(
        *(x.data_ptr(), panels.codes.data_ptr()),
        *(scale.data_ptr(), _KINDS[scale.dtype]),
        *(_address(zero), 0 if zero is None else _KINDS[zero.dtype]),
        *(_address(panels.table), _address(bias), y.data_ptr()),
        *(x.numel() // in_features, in_features, out_features, panels.group),
        torch.get_num_threads(),
    )


def serves_quantized(weight: QuantizedWeight) -> bool:
    """Whether `QuantizedPanelLinear` serves this weight on the CPU."""
    return (
        weight.scale.dtype in _KINDS
        and (weight.group % 2 == 0 or weight.group >= weight.shape[1])
        and cpu_library.function("quantized_linear", weight.code_type) is not None
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed_codes(weight: QuantizedWeight) -> Tensor:
    """int8 `[ceil(out / 16), in, 16]`, with 4 bits `[ceil(out / 16), ceil(in / 2), 16]`."""
    pieces = []
    for start in range(0, weight.shape[0], _PIECE_ROWS):
        codes = weight.codes[start : start + _PIECE_ROWS]
        if weight.code_type.bits == 4:
            codes = F.pad(codes, (0, codes.shape[1] % 2))
            codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        pieces.append(_in_panels(codes))
    return torch.cat(pieces)


def _in_panels(rows: Tensor) -> Tensor:
    """`rows [n, columns]` as `[ceil(n / 16), columns, 16]`, with zeros after the last row."""
    whole = F.pad(rows, (0, 0, 0, -len(rows) % _PANEL))
    return whole.view(-1, _PANEL, rows.shape[1]).transpose(1, 2).contiguous()
