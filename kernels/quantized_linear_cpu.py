"""Linear layers with quantized weights on the CPU, multiplied in fp32 by the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library
from .linear import QuantizedLinear
from .quantized_weight import CodeType, QuantizedWeight

_PANEL = 16
"""PANEL of `cpu/linear.h`."""
_PIECE_ROWS = 64
"""Rows that are packed at a time: a multiple of the panel."""
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}
"""`Kind` of `cpu/quantized_linear.h`."""


class QuantizedPanelLinear(QuantizedLinear):
    """Codes in panels of 16 outputs, which become fp32 numbers while they are multiplied.

    The bits of a row do not depend on the rows that are computed with it. Two codes of 4 bits share
    a byte.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    table: Tensor | None
    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.float()
        super().__init__(weight.shape, bias, weight.row_norms())
        self.code_type, self.group = weight.code_type, weight.group
        self.register_buffer("codes", _packed_codes(weight))
        self.register_buffer("scale", _in_panels(weight.scale))
        self.register_buffer("zero", None if weight.zero is None else _in_panels(weight.zero))
        self.register_buffer("table", weight.table)
        self.register_buffer("order", weight.order)
        stored = (self.codes, self.scale, self.zero, self.table, self.order)
        self.weight_bytes = sum(tensor.nbytes for tensor in stored if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias).to(x.dtype)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x, None)

    def weight_rows(self, indices: Tensor) -> Tensor:
        panels, places = indices // _PANEL, indices % _PANEL
        codes = self.codes[panels, :, places]
        if self.code_type.bits == 4:
            codes = _unpacked(codes, self.code_type)[:, : self.in_features]
        return QuantizedWeight(
            self.code_type,
            codes,
            self.scale[panels, :, places],
            self.group,
            zero=None if self.zero is None else self.zero[panels, :, places],
            table=self.table,
            order=self.order,
        ).dequantize()

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [..., in]` to fp32 `[..., out]`."""
        function = cpu_library.function("quantized_linear", self.code_type)
        assert function is not None
        x = x.float() if self.order is None else x.float().index_select(-1, self.order)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        function(
            *(x.data_ptr(), self.codes.data_ptr()),
            *(self.scale.data_ptr(), _KINDS[self.scale.dtype]),
            *(_address(self.zero), 0 if self.zero is None else _KINDS[self.zero.dtype]),
            *(_address(self.table), _address(bias), y.data_ptr()),
            *(x.numel() // self.in_features, self.in_features, self.out_features, self.group),
            torch.get_num_threads(),
        )
        return y


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


def _unpacked(pairs: Tensor, code_type: CodeType) -> Tensor:
    """int8 `[n, in]` of two codes of 4 bits in a byte, `[n, in / 2]`."""
    high = pairs >> 4  # with its sign, as the codes of INT4 have one
    low = (pairs << 4) >> 4
    codes = torch.stack([low, high], dim=-1).flatten(1)
    return codes if code_type is CodeType.INT4 else codes & 15


def _in_panels(rows: Tensor) -> Tensor:
    """`rows [n, columns]` as `[ceil(n / 16), columns, 16]`, with zeros after the last row."""
    whole = F.pad(rows, (0, 0, 0, -len(rows) % _PANEL))
    return whole.view(-1, _PANEL, rows.shape[1]).transpose(1, 2).contiguous()
