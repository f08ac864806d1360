"""The time of steps beyond their prediction, by proposer."""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt

MEMORY = 0.95
"""The weight of an observation falls by this factor per step: by half in 13."""
IDLE_MEMORY = 0.99
"""The same per step without draft tokens: an old residual fades, so its proposer is tried again."""
PRIOR_WEIGHT = 5.0
"""Number of steps without residual that the estimate starts from."""
CAUTION = 0.5
"""Standard errors."""
MOST = 3.0
"""Times the prediction. A longer step stalled for another reason and is cut to this."""


class StepResiduals:
    """Mean residual of each proposer's steps, against steps without draft tokens.

    The cost model omits planning, bookkeeping of accepted tokens and steps in the cost per row. The
    residual measures all of these together.
    """

    def __init__(self, proposers: Collection[str]) -> None:
        self._plain = _Mean()
        self._drafting = {name: _Mean() for name in proposers}

    def of(self, proposer: str) -> float:
        """Seconds, 0 or more, by which a step with this proposer exceeds its prediction.

        This is the mean plus half its standard error: if steps vary too much to tell whether
        drafting pays, the expected gain has to be larger.
        """
        mean = self._drafting[proposer]
        return max(0.0, mean.value + CAUTION * mean.error)

    def observe(self, proposers: Collection[str], predicted: float, seconds: float) -> None:
        """A step with these proposers took `seconds`; its residual is divided among them."""
        residual = min(seconds, MOST * predicted) - predicted
        if not proposers:
            self._plain.observe(residual)
            for mean in self._drafting.values():
                mean.forget(IDLE_MEMORY)
        for name in proposers:
            self._drafting[name].observe((residual - self._plain.value) / len(proposers))


class _Mean:
    """Exponentially weighted mean."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum = 0.0
        self._squares = 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        if not self._weight:
            return 0.0
        variance = self._squares / self._weight - (self._sum / self._weight) ** 2
        return sqrt(max(0.0, variance) / (self._weight + PRIOR_WEIGHT))

    @property
    def value(self) -> float:
        return self._sum / (self._weight + PRIOR_WEIGHT)

    def forget(self, memory: float) -> None:
        self._weight *= memory
        self._sum *= memory
        self._squares *= memory

    def observe(self, value: float) -> None:
        self.forget(MEMORY)
        self._weight += 1.0
        self._sum += value
        self._squares += value * value
