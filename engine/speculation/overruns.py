"""The time that steps take beyond their prediction, by proposer."""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt

MEMORY = 0.95
"""The factor of earlier weights per step: a half-life of 13 steps."""
IDLE_MEMORY = 0.99
"""The decay of the estimate in a step without draft tokens, so that a proposer disabled by it is
tried again."""
PRIOR_WEIGHT = 5.0
"""The prior: this many steps with exactly the predicted duration, because few steps say little."""
CAUTION = 0.5
"""Standard errors."""
MOST = 3.0
"""A step that takes longer than this many times its prediction stalled, which says nothing about
draft tokens."""


class Overruns:
    """The time that steps with draft tokens take beyond their prediction, per proposer.

    Predictions omit some costs: deciding what to propose, processing what was accepted, rows that
    cost more from some number on. They are measured together, relative to steps without draft
    tokens, whose predictions may have the same errors.
    """

    def __init__(self, proposers: Collection[str]) -> None:
        self._plain = _Mean()
        self._drafting = {name: _Mean() for name in proposers}

    def of(self, proposer: str) -> float:
        """Seconds more than predicted, 0 or more, of a step in which it proposes.

        It is their mean and half its standard error: where steps are too uneven to tell whether
        drafting pays, it has to promise more.
        """
        mean = self._drafting[proposer]
        return max(0.0, mean.value + CAUTION * mean.error)

    def observe(self, proposers: Collection[str], predicted: float, seconds: float) -> None:
        """A step with drafts of these proposers took this long; they share the excess equally."""
        overrun = min(seconds, MOST * predicted) - predicted
        if not proposers:
            self._plain.observe(overrun)
            for mean in self._drafting.values():
                mean.forget(IDLE_MEMORY)
        for name in proposers:
            self._drafting[name].observe((overrun - self._plain.value) / len(proposers))


class _Mean:
    """A mean of recent values."""

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
