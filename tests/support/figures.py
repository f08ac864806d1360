"""Whether what a benchmark measured is a figure."""

from __future__ import annotations

import math


def is_figure(value: float) -> bool:
    """Whether it is finite and more than zero."""
    return math.isfinite(value) and value > 0
