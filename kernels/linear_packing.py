"""Chooses the implementation of a base linear layer by device, dtype and bits per weight."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from .int4_linear import Int4Linear
from .int8_linear import Int8Linear
from .linear import DenseLinear, Linear, PackedLinear
from .linear_cpu import PanelLinear, serves_linear
from .quantize import quantize_int4, quantize_int8

Bits = Literal[4, 8]
"""Bits of a quantized weight."""


def pack_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    bits: Bits | None = None,
    dtype: torch.dtype | None = None,
) -> Linear:
    """The fastest form that keeps the weight's values; with `bits`, one that keeps that many.

    weight: `[out, in]`; bias: `[out]`. `dtype`: in which it is multiplied, if not in the weight's.
    """
    if bits is None:
        return _pack_exactly(weight, bias, dtype or weight.dtype)
    if weight.device.type == "cpu":
        return Int8Linear(weight, bias) if bits == 8 else Int4Linear(weight, bias)
    from .wna16_linear import WNA16Linear  # needs Triton, which a CPU build of PyTorch lacks

    return WNA16Linear(quantize_int8(weight) if bits == 8 else quantize_int4(weight), bias)


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
