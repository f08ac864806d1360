"""Small test drafts for requests without drafts, to detect when speculation pays off again."""

from __future__ import annotations

NUM_TOKENS = 2
"""The length of a probe: the second token shows whether more would be accepted."""
SHORTEST = 4
LONGEST = 256
"""Steps from a probe to the next."""
SHARE = 0.01
"""The share of the steps' time for probes."""
MOST_STEPS = 2.0
"""The maximum savings for probes, in steps of the engine."""


class ProbeTimes:
    """When one pair of adapter and proposer is probed: ever more seldom, until it shows success."""

    def __init__(self) -> None:
        self.last_step = -1
        """The step of its last probe."""
        self.next_step = 0
        """Not before it is another one due."""
        self._interval = SHORTEST

    def is_due(self, step: int) -> bool:
        return step >= self.next_step

    def begin(self, step: int) -> None:
        """The probe fails unless `succeed` is called."""
        self.last_step = step
        self.next_step = step + self._interval
        self._interval = min(2 * self._interval, LONGEST)

    def succeed(self) -> None:
        self._interval = SHORTEST
        self.next_step = self.last_step + SHORTEST


class ProbeBudget:
    """The budget of all probes together: a share of the time of steps."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def earn(self, step_seconds: float, num_steps: int = 1) -> None:
        """This many steps took this long each."""
        most = max(self._seconds, MOST_STEPS * step_seconds)
        self._seconds = min(self._seconds + SHARE * num_steps * step_seconds, most)

    def spend(self, seconds: float, step_seconds: float) -> bool:
        """Whether a probe with this cost is affordable; if so, it is charged.

        A cost that could never be afforded counts as the maximum savings: it may be wrong, and only
        a probe can tell. The intervals of such probes keep them rare.
        """
        price = min(seconds, MOST_STEPS * step_seconds)
        if price > self._seconds:
            return False
        self._seconds -= price
        return True
