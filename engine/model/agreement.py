"""Whether a layer's replacement computes what the layer's own code computes."""

from __future__ import annotations

import torch
from torch import Tensor

LAST_PLACES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The largest difference of two results, relative to an element: two units in the last place of the
half types, whose results may be rounded twice."""
ROUNDING_OF_LARGEST = 1e-6
"""Allowed in addition, relative to the largest element: a difference of two products keeps the
rounding of both."""
MAX_ROUNDED_OTHERWISE = 0.01
"""The share of elements that may differ in the half types. Rounding at another place changes a
quarter."""


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results are equal but for the last bits of a few elements."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if theirs.dtype not in LAST_PLACES:
        return False
    wide = theirs.float()
    difference = (ours.float() - wide).abs()
    largest = ROUNDING_OF_LARGEST * wide.abs().max()
    if not (difference <= LAST_PLACES[theirs.dtype] * wide.abs() + largest).all():
        return False
    share = (difference > 0).float().mean().item()
    return theirs.dtype is torch.float32 or share <= MAX_ROUNDED_OTHERWISE
