"""How far the logits of packed layers may be from those of the same values, multiplied densely."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...kernels.int8_linear import Int8Linear
from ...kernels.packed_experts_cpu import PanelExperts
from ...kernels.quantized_linear_cpu import QuantizedPanelLinear

SELF_TEST_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest error relative to the largest logit; the half types round at every layer."""
ROUNDED_INPUTS_TOLERANCE = SELF_TEST_TOLERANCE[torch.float16]
"""Of layers that round their inputs to 16 bits (decision 55), which fp16 does to 11 bits."""
BYTE_INPUTS_TOLERANCE = SELF_TEST_TOLERANCE[torch.bfloat16]
"""Of layers that round their inputs to 8 bits, as many as bf16 has. The dense layers round them to
the same numbers, but what they round differs by the dtype's own error, so both add up."""


def parity_bound(dtype: torch.dtype, parts: Iterable[object]) -> float:
    """The largest error, relative to the largest logit, that rounding explains. `parts`: the packed
    layers of a model that computes in dtype."""
    tolerance, packed = SELF_TEST_TOLERANCE[dtype], list(parts)
    if any(isinstance(part, Int8Linear) for part in packed):
        return tolerance + BYTE_INPUTS_TOLERANCE
    return max(tolerance, ROUNDED_INPUTS_TOLERANCE) if any(map(_rounds, packed)) else tolerance


def _rounds(part: object) -> bool:
    return isinstance(part, QuantizedPanelLinear | PanelExperts) and part.rounds_inputs
