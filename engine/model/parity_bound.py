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
"""Of layers that round their inputs to 8 bits, as both sides do: bf16 has as many."""


def parity_bound(dtype: torch.dtype, parts: Iterable[object]) -> float:
    """The largest error, relative to the largest logit, that rounding explains. `parts`: the packed
    layers of a model that computes in dtype."""
    return max(SELF_TEST_TOLERANCE[dtype], *map(_rounding, parts), 0.0)


def _rounding(part: object) -> float:
    if isinstance(part, Int8Linear):
        return BYTE_INPUTS_TOLERANCE
    rounds = isinstance(part, QuantizedPanelLinear | PanelExperts) and part.rounds_inputs
    return ROUNDED_INPUTS_TOLERANCE if rounds else 0.0
