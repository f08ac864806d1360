"""Chooses the implementation of a base linear layer by device, dtype and bits per weight."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .int8_linear import Int8Linear, has_fast_int8, serves_int8
from .linear import DenseLinear, Linear, PackedLinear
from .linear_cpu import PanelLinear, serves_linear
from .quantize import WeightFormat, quantize
from .quantized_linear import DequantizedLinear
from .quantized_linear_cpu import QuantizedPanelLinear, serves_quantized
from .quantized_weight import QuantizedWeight


def pack_linear(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    weight_format: WeightFormat | None = None,
    dtype: torch.dtype | None = None,
) -> Linear:
    """The fastest form that keeps the weight's values.

    weight: `[out, in]`; bias: `[out]`. `weight_format`: how a weight that is not quantized yet is
    quantized first. `dtype`: in which it is multiplied, if not in the weight's.
    """
    if isinstance(weight, QuantizedWeight):
        return _pack_quantized(weight, bias, dtype or torch.float32)
    if weight_format is not None:
        return _pack_quantized(quantize(weight, weight_format), bias, dtype or weight.dtype)
    return _pack_exactly(weight, bias, dtype or weight.dtype)


def _pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    if weight.codes.is_cuda:
        from .wna16_linear import pack_wna16  # needs Triton, which a CPU build of PyTorch lacks

        return pack_wna16(weight, bias, dtype)
    is_for_onednn = serves_int8(weight)
    if is_for_onednn and has_fast_int8():
        return Int8Linear(weight, bias)
    if serves_quantized(weight):
        return QuantizedPanelLinear(weight, bias)
    return Int8Linear(weight, bias) if is_for_onednn else DequantizedLinear(weight, bias)


def _pack_exactly(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    has_fast_bfloat16 = dtype is torch.bfloat16 and _has_onednn(dtype)
    if has_fast_bfloat16 or not serves_linear(weight):
        weight = weight.to(dtype)
    if serves_linear(weight) and not has_fast_bfloat16:
        return PanelLinear(weight, bias)
    if weight.device.type == "cpu" and _has_onednn(dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


@cache
def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type fast."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()
