"""Steps that deliberately draft less, to measure the cost of draft tokens.

If all steps are alike, the cost of a draft token cannot be separated from the cost of a step.
"""

from __future__ import annotations

FIRST = 4
LONGEST = 48
"""Steps with draft tokens from one such step to the next: the intervals double from the first
on."""
SIMILAR = 2.0
"""If the number of sequences changes by more than this factor, step costs are learned again."""


class Contrasts:
    """Decides for each step which part of the profitable draft is used: all, none or half."""

    def __init__(self) -> None:
        self._num_sequences = 0
        self._interval = FIRST
        self._num_left = FIRST
        """Steps to the next comparison."""
        self._part = 0.5

    def part(self, num_sequences: int) -> float:
        """The part of the draft tokens to use in the next step with drafts and this many
        sequences."""
        if not self._is_similar(num_sequences):
            is_first = not self._num_sequences
            self._num_sequences, self._interval = num_sequences, FIRST
            self._num_left = FIRST if is_first else 1
        self._num_left -= 1
        if self._num_left > 0:
            return 1.0
        self._num_left = self._interval
        self._interval = min(2 * self._interval, LONGEST)
        self._part = 0.5 - self._part
        return self._part

    def _is_similar(self, num_sequences: int) -> bool:
        known = self._num_sequences
        return known < SIMILAR * num_sequences and num_sequences < SIMILAR * known
