"""Estimates the growth rate of a quantity, with a confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

BLOCK_SECONDS = 60.0
MIN_BLOCKS = 4
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Growth:
    """A least-squares slope and its confidence interval, in units an hour."""

    per_hour: float
    low: float
    high: float


def growth_of(seconds: Sequence[float], values: Sequence[float]) -> Growth:
    """The slope of samples that were taken one after another, with its 95 % interval.

    Samples seconds apart tell much the same, so an interval that took them for independent would
    be far too narrow. They are averaged into blocks of a minute, and the slope is fitted to the
    blocks. Blocks that still resemble their neighbours count as fewer (`_effective_count`), in the
    standard error and in the degrees of freedom, after Santer et al. (2000, 2008), who test trends
    of climate in this way. The interval is never narrower than that of ordinary least squares.

    Raises ValueError if there are fewer than four minutes.
    """
    times, means = block_means(seconds, values)
    if len(times) < MIN_BLOCKS:
        raise ValueError(f"{len(times)} minutes say nothing about a slope")
    offsets = _offsets([time / 3600 for time in times])
    slope = _dot(offsets, means) / _dot(offsets, offsets)
    residuals = [y - slope * x for x, y in zip(offsets, _offsets(means), strict=True)]
    degrees = max(1.0, _effective_count(residuals) - 2)
    error = math.sqrt(_dot(residuals, residuals) / degrees / _dot(offsets, offsets))
    reach = student_quantile(0.5 + CONFIDENCE / 2, int(degrees)) * error
    return Growth(slope, slope - reach, slope + reach)


def block_means(
    seconds: Sequence[float], values: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The mean time and the mean value of each minute that has samples, in order."""
    blocks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for time, value in zip(seconds, values, strict=True):
        blocks[int(time // BLOCK_SECONDS)].append((time, value))
    ordered = [blocks[number] for number in sorted(blocks)]
    times = [fmean(time for time, _ in block) for block in ordered]
    return times, [fmean(value for _, value in block) for block in ordered]


def student_quantile(probability: float, degrees: int) -> float:
    """Of Student's t distribution, for a probability of 0.5 to 0.9999."""
    low, high = 0.0, 1e5
    while high - low > 1e-9 * max(high, 1.0):
        middle = (low + high) / 2
        if 0.5 + _central_part(middle, degrees) / 2 < probability:
            low = middle
        else:
            high = middle
    return high


def _central_part(t: float, degrees: int) -> float:
    """The probability of [-t, t] (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2
    term = total = 0.0 if degrees == 1 else cosine if is_odd else 1.0
    for number in range(3 if is_odd else 2, degrees - 1, 2):
        term *= (number - 1) / number * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _effective_count(residuals: Sequence[float]) -> float:
    """As how many independent ones so many count, by how each resembles the one before it."""
    if not (squares := _dot(residuals, residuals)):
        return len(residuals)
    likeness = max(0.0, _dot(residuals[1:], residuals[:-1]) / squares)
    return len(residuals) * (1 - likeness) / (1 + likeness)


def _offsets(values: Sequence[float]) -> list[float]:
    middle = fmean(values)
    return [value - middle for value in values]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
