"""Baseline steps: some steps propose fewer draft tokens than planned, for comparison.

If all steps had the same number of draft tokens, the cost of a draft token could not be separated
from the cost of a step.
"""

from __future__ import annotations

FIRST = 4
LONGEST = 48
"""Steps with draft tokens between two baseline steps; the interval doubles each time."""
SIMILAR = 2.0
"""If the number of sequences changes by this factor, the costs are learned again."""


class BaselineSteps:
    """Decides for each step which fraction of the planned draft tokens is proposed: 1, 0.5 or 0."""

    def __init__(self) -> None:
        self._num_sequences = 0
        self._interval = FIRST
        self._steps_left = FIRST
        """Until the next baseline step."""
        self._fraction = 0.5

    def fraction(self, num_sequences: int) -> float:
        """The fraction for the next step with draft tokens, which decodes `num_sequences`."""
        if not self._is_similar(num_sequences):
            is_first = not self._num_sequences
            self._num_sequences, self._interval = num_sequences, FIRST
            self._steps_left = FIRST if is_first else 1
        self._steps_left -= 1
        if self._steps_left > 0:
            return 1.0
        self._steps_left = self._interval
        self._interval = min(2 * self._interval, LONGEST)
        self._fraction = 0.5 - self._fraction
        return self._fraction

    def _is_similar(self, num_sequences: int) -> bool:
        known = self._num_sequences
        return known < SIMILAR * num_sequences and num_sequences < SIMILAR * known
