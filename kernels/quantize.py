"""Quantizes dense weights as they are loaded, to the forms that `--quantize` names."""

from __future__ import annotations

from torch import Tensor

from .int4_quantized import GROUP, quantize_groups
from .int8_linear import quantize_weight
from .quantized_weight import CodeType, QuantizedWeight


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """int8 codes of `weight [out, in]` and an fp32 scale for each row."""
    codes, scale = quantize_weight(weight)
    return QuantizedWeight(CodeType.INT8, codes, scale, group=weight.shape[1])


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """int4 codes of `weight [out, in]` and a bf16 scale for each row and `GROUP` columns."""
    codes, scale = quantize_groups(weight)
    return QuantizedWeight(CodeType.INT4, codes.flatten(1)[:, : weight.shape[1]], scale, GROUP)
