"""Checks of fractional numbers in options."""

from __future__ import annotations

import math

import typer


def check_finite(value: float | None) -> float | None:
    """The number. Raises BadParameter for infinity and NaN, which limits of options let pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("Input should be a finite number")
    return value


def parse_finite(text: str) -> float:
    """The number. Raises ValueError, also for infinity and NaN, which JSON cannot hold."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
