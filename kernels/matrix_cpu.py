"""The linear layers that the CPU's library multiplies within other operations."""

from __future__ import annotations

import ctypes

import torch

from .bfloat16_linear_cpu import BFloat16PanelLinear
from .int8_linear_cpu import Int8PanelLinear
from .linear import Linear
from .linear_cpu import PanelLinear
from .quantized_linear_cpu import SCALE_KINDS, QuantizedPanelLinear
from .quantized_weight import CodeType

_FORMS = {torch.float32: 0, torch.bfloat16: 1}
"""`MatrixForm` of `cpu/matrix.h`, by a panel's dtype."""
_INT8_FORM, _RAISED_FORM = 2, 3


class Matrix(ctypes.Structure):
    """Matrix of `cpu/matrix.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("form", "scale_kind")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "group")),
    )


def is_matrix(linear: Linear, dtype: torch.dtype) -> bool:
    """Whether the library multiplies inputs of this dtype, fp32 or bf16, by this layer."""
    if isinstance(linear, Int8PanelLinear):
        return True
    if isinstance(linear, QuantizedPanelLinear):
        panels = linear.panels
        has_codes_alone = panels.zero is None and linear.order is None
        return dtype is torch.float32 and panels.code_type is CodeType.INT8 and has_codes_alone
    if dtype is torch.bfloat16:
        return isinstance(linear, BFloat16PanelLinear)
    return isinstance(linear, PanelLinear) and dtype is torch.float32


def matrix_of(linear: Linear) -> Matrix:
    """What the library gets of a layer, which must outlive it and which `is_matrix`."""
    bias = None if linear.bias is None else linear.bias.data_ptr()
    sizes = linear.in_features, linear.out_features
    if isinstance(linear, QuantizedPanelLinear):
        panels = linear.panels
        return Matrix(
            *(panels.codes.data_ptr(), panels.scale.data_ptr(), bias),
            *(_INT8_FORM, SCALE_KINDS[panels.scale.dtype], *sizes, panels.group),
        )
    if isinstance(linear, Int8PanelLinear):
        scale = linear.weight_scale.data_ptr()
        return Matrix(linear.weight.data_ptr(), scale, bias, _RAISED_FORM, 0, *sizes, 0)
    assert isinstance(linear, PanelLinear | BFloat16PanelLinear)
    return Matrix(linear.weight.data_ptr(), None, bias, _FORMS[linear.weight.dtype], 0, *sizes, 0)
