"""Small test drafts for requests without drafts, to detect when speculation pays off again."""

from __future__ import annotations

NUM_TOKENS = 2
"""Of a probe: the second shows whether more would follow."""
SHORTEST = 4
LONGEST = 256
"""Steps from a probe to the next."""
SHARE = 0.01
"""Of the steps' time that may be spent on probes."""
MOST_STEPS = 2.0
"""Of the engine's steps, how many's time may be saved up for probes."""


class ProbeTimes:
    """When one pair of adapter and proposer is probed: ever more seldom, until it shows success."""

    def __init__(self) -> None:
        self.last_step = -1
        """Of its last probe."""
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
    """What all probes together may cost: a share of the time that steps take."""

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
