"""What handing prefixes over from one replica to another takes. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

RETRY_SECONDS = 60.0
"""After this time a pair of replicas that was too slow is tried again: it may have been busy."""
MIN_TOKENS_TIMED = 256
"""Fewer computed tokens say little of the time that a token takes."""
_NUM_TIMED = 8


class HandoverPace:
    """The last handovers of one pair: computing the prompts, and passing the prefixes on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow_at: float | None = None
        """When a handover took longer on its way than in its computation, or was given up."""
        self._unread_at: float | None = None
        """When the target could not read the memory of the source."""
        self._token_seconds: deque[float] = deque(maxlen=_NUM_TIMED)

    def note(self, num_tokens: int, *, computed: float, passed_on: float) -> None:
        """The seconds of a handover that is complete, and how many tokens were computed for it."""
        self._slow_at = self._clock() if passed_on > computed else None
        if num_tokens >= MIN_TOKENS_TIMED:
            self._token_seconds.append(computed / num_tokens)

    def note_late(self) -> None:
        """A handover was given up because it took too long. What is known of the computation holds
        no more."""
        self._slow_at = self._clock()
        self._token_seconds.clear()

    def note_unread(self) -> None:
        """The target could not read what the source had left in shared memory."""
        self._unread_at = self._clock()

    def shares_memory(self) -> bool:
        """Whether nothing has shown of late that the pair shares no memory."""
        return self._unread_at is None or self._clock() - self._unread_at >= RETRY_SECONDS

    def pays(self) -> bool:
        """Whether to hand the next prompt over."""
        return self._slow_at is None or self._clock() - self._slow_at >= RETRY_SECONDS

    @property
    def token_seconds(self) -> float | None:
        """The time that a prompt's token takes if the replica is not busy; None: unknown."""
        return min(self._token_seconds, default=None)
