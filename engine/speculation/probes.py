"""Probes: small drafts for requests that get none, to notice when drafting pays again."""

from __future__ import annotations

NUM_TOKENS = 2
"""Draft tokens of a probe: the second shows whether longer drafts are useful."""
SHORTEST = 4
LONGEST = 256
"""Shortest and longest interval between probes, in steps."""
SHARE = 0.01
"""Share of the steps' time that probes may take."""
MOST_STEPS = 2.0
"""The budget holds at most the time of this many steps."""


class ProbeTimes:
    """When an adapter and proposer are probed: the interval doubles until a probe succeeds."""

    def __init__(self) -> None:
        self.last_step = -1
        """The step of the last probe."""
        self.next_step = 0
        """The first step in which the next probe is due."""
        self._interval = SHORTEST

    def is_due(self, step: int) -> bool:
        return step >= self.next_step

    def begin(self, step: int) -> None:
        """Start a probe. It counts as failed unless `succeed` is called."""
        self.last_step = step
        self.next_step = step + self._interval
        self._interval = min(2 * self._interval, LONGEST)

    def succeed(self) -> None:
        self._interval = SHORTEST
        self.next_step = self.last_step + SHORTEST


class ProbeBudget:
    """The time that all probes together may take: a share of the steps' time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def earn(self, step_seconds: float, num_steps: int = 1) -> None:
        """Add the share of `num_steps` steps of `step_seconds` each."""
        most = max(self._seconds, MOST_STEPS * step_seconds)
        self._seconds = min(self._seconds + SHARE * num_steps * step_seconds, most)

    def spend(self, seconds: float, step_seconds: float) -> bool:
        """Pay for a probe; False if the budget is too small.

        A probe pays at most what the budget can hold: its estimated cost may be wrong, and only a
        probe can show that. The intervals keep such probes rare.
        """
        price = min(seconds, MOST_STEPS * step_seconds)
        if price > self._seconds:
            return False
        self._seconds -= price
        return True
