"""Linear layers with quantized weights on the CPU, multiplied by the library."""

from __future__ import annotations

from dataclasses import dataclass

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
SCALE_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}
"""`Kind` of `cpu/quantized_linear.h`."""

_LEAST_SPLIT = 2.0**-100
"""Of smaller inputs the second part would be no normal number."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A quantized matrix `[out, in]` in panels of 16 outputs; inputs are in the order of the codes.

    int8 and int4 codes are multiplied as integers, by inputs that are rounded to at most 2^-15 of
    the largest of 128 in the same row (decision 55).
    """

    code_type: CodeType
    shape: tuple[int, int]
    """`[out, in]`."""
    group: int
    codes: Tensor
    """int8 `[panels, words, 16, 2]`: `Word` of `cpu/quantized_weight.h`."""
    scale: Tensor
    """`[panels, groups, 16]`."""
    zero: Tensor | None
    """Like scale."""
    table: Tensor | None

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scale, self.zero, self.table)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class QuantizedPanelLinear(QuantizedLinear):
    """Codes in panels of 16 outputs; sums in fp32.

    The bits of a row do not depend on the rows that are computed with it.
    """

    rounds_inputs: bool
    """Whether inputs may be rounded to 16 bits."""
    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.float()
        super().__init__(weight.shape, bias, weight.row_norms())
        self.panels = pack_panels(weight)
        self.rounds_inputs = weight.code_type.is_integer
        self.register_buffer("order", weight.order)
        self.weight_bytes = self.panels.num_bytes
        if weight.order is not None:
            self.weight_bytes += weight.order.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias).to(x.dtype)

    def products(self, x: Tensor) -> Tensor:
        # In two parts: the first has few bits, so that it is not rounded, and the second is small.
        x = x.float()
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(_LEAST_SPLIT)
        unit = largest / torch.frexp(largest).mantissa * 2.0**-14
        coarse = (x / unit).round_().mul_(unit)
        return self._multiply(coarse, None) + self._multiply(x - coarse, None)

    def weight_rows(self, indices: Tensor) -> Tensor:
        panels, places = indices // _PANEL, indices % _PANEL
        stored = self.panels
        words = stored.codes[panels, :, places]
        zero = None if stored.zero is None else stored.zero[panels, :, places]
        return QuantizedWeight(
            stored.code_type,
            _unpacked(words, stored.code_type)[:, : self.in_features],
            stored.scale[panels, :, places],
            stored.group,
            zero=zero,
            table=stored.table,
            order=self.order,
        ).dequantize()

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
    assert x.shape[-1] == in_features
    assert y.dtype is x.dtype is torch.float32
    scale, zero = panels.scale, panels.zero
    function(
        *(x.data_ptr(), panels.codes.data_ptr()),
        *(scale.data_ptr(), SCALE_KINDS[scale.dtype]),
        *(_address(zero), 0 if zero is None else SCALE_KINDS[zero.dtype]),
        *(_address(panels.table), _address(bias), y.data_ptr()),
        *(x.numel() // in_features, in_features, out_features, panels.group),
        torch.get_num_threads(),
    )


def serves_quantized(weight: QuantizedWeight) -> bool:
    """Whether `QuantizedPanelLinear` serves this weight on the CPU."""
    return (
        weight.scale.dtype in SCALE_KINDS
        and (weight.group % 4 == 0 or weight.group >= weight.shape[1])
        and serves_codes(weight.code_type)
    )


def serves_codes(code_type: CodeType) -> bool:
    """Whether the library multiplies such codes on this machine."""
    return cpu_library.function("quantized_linear", code_type) is not None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed_codes(weight: QuantizedWeight) -> Tensor:
    """int8 `[ceil(out / 16), words, 16, 2]`: `Word` of `cpu/quantized_weight.h`."""
    num_rows, in_features = weight.shape
    num_codes = 16 // weight.code_type.bits
    num_words = -(-in_features // num_codes)
    packed = weight.codes.new_empty(-(-num_rows // _PANEL), num_words, _PANEL, 2)
    for start in range(0, num_rows, _PIECE_ROWS):
        codes = weight.codes[start : start + _PIECE_ROWS]
        words = F.pad(codes, (0, -in_features % num_codes)).unflatten(1, (-1, num_codes))
        if num_codes == 4:
            words = (words[..., :2] & 15) | (words[..., 2:] << 4)
        first = start // _PANEL
        packed[first : first + _PIECE_ROWS // _PANEL] = _in_panels(words)
    return packed


def _unpacked(words: Tensor, code_type: CodeType) -> Tensor:
    """The codes of words, int8 `[n, words, 2]`, one after another: `[n, codes]`."""
    if code_type.bits == 4:
        low, high = (words << 4) >> 4, words >> 4  # with their signs, as the codes of INT4 have one
        words = torch.cat([low, high], dim=-1)
        words = words if code_type is CodeType.INT4 else words & 15
    return words.flatten(1)


def _in_panels(rows: Tensor) -> Tensor:
    """`rows [n, m, ...]` as `[ceil(n / 16), m, 16, ...]`, with zeros after the last row."""
    num_panels = -(-len(rows) // _PANEL)
    whole = rows.new_zeros(num_panels * _PANEL, *rows.shape[1:])
    whole[: len(rows)] = rows
    return whole.view(num_panels, _PANEL, *rows.shape[1:]).transpose(1, 2).contiguous()
