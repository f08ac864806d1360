"""Chooses the implementation of a base linear layer by device, dtype and bits per weight."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from .bfloat16_linear_cpu import BFloat16PanelLinear, serves_bfloat16
from .int8_linear import OneDnnInt8Linear, has_fast_int8, serves_int8
from .int8_linear_cpu import Int8PanelLinear, serves_int8_panels
from .linear import DenseLinear, Linear, PackedLinear, QuantizedLinear
from .linear_cpu import PanelLinear, serves_linear
from .quantized_linear import DequantizedLinear
from .quantized_linear_cpu import QuantizedPanelLinear, serves_codes, serves_quantized
from .quantized_weight import CodeType, QuantizedWeight
from .wna16_weight import has_served_groups


class LinearKind(StrEnum):
    """The implementations, by the names of their classes."""

    DENSE = "DenseLinear"
    PACKED = "PackedLinear"
    PANEL = "PanelLinear"
    BFLOAT16_PANEL = "BFloat16PanelLinear"
    ONEDNN_INT8 = "OneDnnInt8Linear"
    INT8_PANEL = "Int8PanelLinear"
    QUANTIZED_PANEL = "QuantizedPanelLinear"
    DEQUANTIZED = "DequantizedLinear"
    WNA16 = "WNA16Linear"

    @property
    def is_packed_by_rows(self) -> bool:
        """Whether a weight that is not quantized is read in slices of a few rows."""
        return self in (LinearKind.PANEL, LinearKind.BFLOAT16_PANEL)

    @property
    def multiplies_bytes(self) -> bool:
        """Whether it is an `Int8Linear`."""
        return self in (LinearKind.ONEDNN_INT8, LinearKind.INT8_PANEL)


_EXACT_FORMS = {
    LinearKind.DENSE: DenseLinear,
    LinearKind.PACKED: PackedLinear,
    LinearKind.PANEL: PanelLinear,
    LinearKind.BFLOAT16_PANEL: BFloat16PanelLinear,
}
"""Of weights that are not quantized."""


def pack_linear(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    multiplies_bytes: bool | None = None,
) -> Linear:
    """The fastest form that keeps the weight's values.

    weight: `[out, in]`; bias: `[out]`. `dtype`: in which it is multiplied, if not in the weight's,
    or of a quantized one in fp32. `multiplies_bytes`: as of `choose_linear`.
    """
    if isinstance(weight, Tensor):
        return _pack_exactly(weight, bias, dtype or weight.dtype)
    return _pack_quantized(weight, bias, dtype or torch.float32, multiplies_bytes)


def choose_linear(
    weight: Tensor | QuantizedWeight,
    *,
    dtype: torch.dtype,
    device_type: str,
    multiplies_bytes: bool | None = None,
) -> LinearKind:
    """The form that `pack_linear` gives a weight that is on a device of this type, multiplied in
    dtype. The weight itself may be on the meta device.

    `multiplies_bytes`: whether int8 weights with a scale per output are multiplied as bytes; None:
    if `prefers_bytes`.
    """
    if isinstance(weight, Tensor):
        return _choose_exact(weight.dtype, dtype, device_type)
    chosen = choose_readable(weight, device_type=device_type)
    if device_type == "cpu" and serves_int8(weight):
        are_bytes = prefers_bytes() if multiplies_bytes is None else multiplies_bytes
        if are_bytes:
            return LinearKind.INT8_PANEL if serves_int8_panels() else LinearKind.ONEDNN_INT8
    return chosen


def prefers_bytes() -> bool:
    """Whether bytes are the fastest way to multiply int8 weights with a scale per output on the
    CPU. oneDNN's speed is measured, so processes may differ."""
    return serves_int8_panels() or has_fast_int8() or not serves_codes(CodeType.INT8)


def choose_readable(weight: QuantizedWeight, *, device_type: str) -> LinearKind:
    """The form that `pack_readable` gives a weight on a device of this type; DENSE: none."""
    if device_type == "cuda":
        return LinearKind.WNA16 if has_served_groups(weight) else LinearKind.DENSE
    is_in_panels = device_type == "cpu" and serves_quantized(weight)
    return LinearKind.QUANTIZED_PANEL if is_in_panels else LinearKind.DEQUANTIZED


def pack_readable(weight: QuantizedWeight, bias: Tensor | None = None) -> QuantizedLinear:
    """The fastest form whose rows can be read, which multiplies activations that are not quantized.

    Only if `choose_readable` has one.
    """
    match choose_readable(weight, device_type=weight.codes.device.type):
        case LinearKind.QUANTIZED_PANEL:
            return QuantizedPanelLinear(weight, bias)
        case LinearKind.DEQUANTIZED:
            return DequantizedLinear(weight, bias)
        case kind:
            assert kind is LinearKind.WNA16
            from .wna16_linear import WNA16Linear  # needs Triton, as above

            return WNA16Linear(weight, bias)


def packed_dtype(stored: torch.dtype, *, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """In which a weight that is not quantized is packed, to be multiplied in dtype."""
    keeps = device_type == "cpu" and not _has_fast_bfloat16(dtype) and serves_linear(stored)
    return stored if keeps else dtype


def _choose_exact(stored: torch.dtype, dtype: torch.dtype, device_type: str) -> LinearKind:
    if device_type != "cpu":
        return LinearKind.DENSE
    if dtype is torch.bfloat16 and serves_bfloat16():
        return LinearKind.BFLOAT16_PANEL
    packed = packed_dtype(stored, dtype=dtype, device_type=device_type)
    if serves_linear(packed) and not _has_fast_bfloat16(dtype):
        return LinearKind.PANEL
    return LinearKind.PACKED if _has_onednn(dtype) else LinearKind.DENSE


def _pack_exactly(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    device_type = weight.device.type
    kind = choose_linear(weight, dtype=dtype, device_type=device_type)
    packed = packed_dtype(weight.dtype, dtype=dtype, device_type=device_type)
    if packed is not weight.dtype:
        weight = weight.to(packed)
    return _EXACT_FORMS[kind](weight, bias)


def _pack_quantized(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, multiplies_bytes: bool | None
) -> Linear:
    device_type = weight.codes.device.type
    match choose_linear(
        weight, dtype=dtype, device_type=device_type, multiplies_bytes=multiplies_bytes
    ):
        case LinearKind.ONEDNN_INT8:
            return OneDnnInt8Linear(weight, bias)
        case LinearKind.INT8_PANEL:
            return Int8PanelLinear(weight, bias)
        case LinearKind.QUANTIZED_PANEL | LinearKind.DEQUANTIZED:
            return pack_readable(weight, bias)
        case _:
            from .wna16_linear import pack_wna16  # needs Triton, which a CPU build may lack

            return pack_wna16(weight, bias, dtype)


def _has_fast_bfloat16(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and (serves_bfloat16() or _has_onednn(dtype))


@cache
def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type fast."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()
