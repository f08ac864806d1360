"""The lease under which an agent serves.

The API server that renews it writes the time into the database after it was asked, and the lease
counts from before that. So it always ends here before the database counts it as ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_OPEN_QUESTIONS = 100


def elapsed_seconds() -> float:
    """A clock that goes on while the machine is suspended, unlike `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """What an agent asked for, and until when it may serve."""

    def __init__(self, clock: Callable[[], float] = elapsed_seconds) -> None:
        self._clock = clock
        self._asked_at: deque[float] = deque(maxlen=MAX_OPEN_QUESTIONS)
        self._num_asked = 0
        self._ends_at: float | None = None

    def ask(self) -> int:
        """Note the time of a question; returns its number."""
        self._asked_at.append(self._clock())
        self._num_asked += 1
        return self._num_asked - 1

    def renew(self, number: int, seconds: float) -> None:
        """Take the answer to a question; one to an old question is ignored. A lost lease stays
        lost."""
        place = number - self._num_asked
        if not self.is_lost and -len(self._asked_at) <= place < 0:
            self._ends_at = max(self._ends_at or 0.0, self._asked_at[place] + seconds)

    @property
    def is_held(self) -> bool:
        """Whether the agent may serve."""
        return self._ends_at is not None and self._clock() < self._ends_at

    @property
    def is_lost(self) -> bool:
        """Whether it was held and has ended."""
        return self._ends_at is not None and self._clock() >= self._ends_at
