"""Decides whether a canary exceeds its limits.

Each limited figure is compared by its certainty: by how many standard errors the difference between
the two versions exceeds the limit. The sums are looked at again and again, so a fixed bound would
be exceeded by chance sooner or later. The bound is that of the normal mixture (Robbins 1970): a
difference that equals the limit exceeds it at any of its looks with a probability of at most
`FALSE_ALARMS / NUM_SIDES`, as far as the figure's mean is normal. So a canary that is no worse than
its limits is rolled back with a probability of at most `FALSE_ALARMS`, however long it runs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .canary_limits import CanaryLimits
from .canary_sums import ArmSums

FALSE_ALARMS = 0.01
NUM_SIDES = 6
"""One of each figure, and two of the length."""
PRIOR_REQUESTS = 20.0
"""For about so many requests the bound is the lowest possible."""
_SMALLEST_ERROR = 1e-9
"""Where all values are equal, so that nothing is divided by zero."""


class Comparison(NamedTuple):
    """A figure of both versions, and the difference."""

    limit: str
    """The name of its limit."""
    allowed: float
    main: float
    canary: float
    num_main: int
    num_canary: int
    certainty: float
    """By how many standard errors the difference exceeds the limit; negative if it is within."""

    @property
    def is_exceeded(self) -> bool:
        """The difference exceeds the limit, and not by chance."""
        return self.certainty > bound(1 / (1 / self.num_main + 1 / self.num_canary))

    def describe(self) -> str:
        """Why the canary was rolled back, for people."""
        if self.limit == "judge":
            return (
                f"judge: the canary won {100 * self.canary:.2f} % of {self.num_canary:,} "
                f"comparisons, a tie counting half; limit {self.allowed:g} below one half"
            )
        return (
            f"{self.limit}: {self._show(self.canary)} in {self.num_canary:,} requests of the "
            f"canary, {self._show(self.main)} in {self.num_main:,} of the other version; "
            f"limit {self.allowed:g}"
        )

    def _show(self, value: float) -> str:
        match self.limit:
            case "error_rate" | "refusals":
                return f"{100 * value:.2f} %"
            case "length":
                return f"{value:.1f} tokens"
        return f"{1000 * value:.1f} ms per token"


def compare(main: ArmSums, canary: ArmSums, limits: CanaryLimits) -> list[Comparison]:
    """The limited figures of which both versions have `min_requests` values."""
    found = [
        _rates("error_rate", limits.error_rate, _errors(main), _errors(canary)),
        _rates("refusals", limits.refusals, _refusals(main), _refusals(canary)),
        _means("length", limits.length, _lengths(main), _lengths(canary), has_two_sides=True),
        _means("latency", limits.latency, _times(main), _times(canary), has_two_sides=False),
        _wins("judge", limits.judge, canary),
    ]
    return [
        each
        for each in found
        if each is not None and min(each.num_main, each.num_canary) >= limits.min_requests
    ]


def bound(num_requests: float) -> float:
    """The certainty of a difference that is not by chance, after so many requests."""
    share = FALSE_ALARMS / NUM_SIDES
    ratio = num_requests / PRIOR_REQUESTS
    return math.sqrt((1 + 1 / ratio) * (math.log(1 + ratio) - 2 * math.log(2 * share)))


class _Rate(NamedTuple):
    num_all: int
    num_hits: int

    @property
    def value(self) -> float:
        return self.num_hits / self.num_all if self.num_all else 0.0

    @property
    def estimate(self) -> float:
        """With a hit and a miss more (Agresti and Caffo 2000), so that its error is never 0."""
        return (self.num_hits + 1) / (self.num_all + 2)

    @property
    def squared_error(self) -> float:
        return self.estimate * (1 - self.estimate) / (self.num_all + 2)


class _LogMean(NamedTuple):
    num_values: int
    total: float
    squares: float

    @property
    def value(self) -> float:
        """The mean of the logarithms."""
        return self.total / self.num_values if self.num_values else 0.0

    @property
    def squared_error(self) -> float:
        if self.num_values < 2:
            return math.inf
        spread = max(0.0, self.squares - self.total * self.value)
        return spread / (self.num_values - 1) / self.num_values


def _errors(sums: ArmSums) -> _Rate:
    return _Rate(sums.num_requests, sums.num_errors)


def _refusals(sums: ArmSums) -> _Rate:
    return _Rate(sums.num_answers, sums.num_refusals)


def _lengths(sums: ArmSums) -> _LogMean:
    return _LogMean(sums.num_lengths, sums.log_length_sum, sums.log_length_squares)


def _times(sums: ArmSums) -> _LogMean:
    return _LogMean(sums.num_times, sums.log_time_sum, sums.log_time_squares)


def _rates(limit: str, allowed: float | None, main: _Rate, canary: _Rate) -> Comparison | None:
    if allowed is None:
        return None
    excess = canary.estimate - main.estimate - allowed
    error = math.sqrt(main.squared_error + canary.squared_error)
    return Comparison(
        limit, allowed, main.value, canary.value, main.num_all, canary.num_all, excess / error
    )


def _means(
    limit: str, allowed: float | None, main: _LogMean, canary: _LogMean, *, has_two_sides: bool
) -> Comparison | None:
    if allowed is None:
        return None
    difference = canary.value - main.value
    excess = (abs(difference) if has_two_sides else difference) - math.log(allowed)
    error = max(math.sqrt(main.squared_error + canary.squared_error), _SMALLEST_ERROR)
    return Comparison(
        limit,
        allowed,
        math.exp(main.value),
        math.exp(canary.value),
        main.num_values,
        canary.num_values,
        excess / error,
    )


def _wins(limit: str, allowed: float | None, canary: ArmSums) -> Comparison | None:
    """The share of comparisons that the canary has won, against one half. Each has an answer of
    both versions. As for rates, a win and a loss more keep the error above 0."""
    if allowed is None or canary.num_judged == 0:
        return None
    num = canary.num_judged
    mean, squares = (canary.score_sum + 1) / (num + 2), (canary.score_squares + 1) / (num + 2)
    error = math.sqrt((squares - mean * mean) / (num + 2))
    share = canary.score_sum / num
    return Comparison(limit, allowed, 1 - share, share, num, num, (0.5 - mean - allowed) / error)
