"""Means with 95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

Z = 1.959963984540054
"""The normal distribution has 95% of its mass within this many standard deviations."""
NUM_RESAMPLES = 2000
SEED = 0
"""Fixed, so that the same scores have the same interval."""


class Interval(msgspec.Struct, frozen=True):
    """A mean, and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def interval(scores: Sequence[float]) -> Interval:
    """The mean of scores from 0 to 1: as a share if all are 0 or 1."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(map(int, scores)), len(scores))
    return bootstrap(scores)


def wilson(num_successes: int, num_cases: int) -> Interval:
    """A share with Wilson's score interval (1927), which holds for few cases too."""
    share = num_successes / num_cases
    weight = 1 / (1 + Z**2 / num_cases)
    center = weight * (share + Z**2 / (2 * num_cases))
    half = weight * Z * math.sqrt(share * (1 - share) / num_cases + (Z / (2 * num_cases)) ** 2)
    # Exact at the ends, where rounding would leave the interval without the share.
    return Interval(share, min(max(center - half, 0.0), share), max(min(center + half, 1.0), share))


def bootstrap(values: Sequence[float]) -> Interval:
    """A mean with the percentile interval of `NUM_RESAMPLES` resamples (Efron, 1979)."""
    drawn = np.random.default_rng(SEED)
    known = np.asarray(values, np.float64)
    means = [known[drawn.integers(0, known.size, known.size)].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(known.mean()), float(low), float(high))
