"""Whether handing prefixes over takes less time than computing them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

RETRY_SECONDS = 60.0
"""After this time a link that was too slow is tried again: it may have been busy."""


class HandoverPace:
    """Compares the last handover's two parts: computing the prompt, and passing it on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow_at: float | None = None
        """When the last handover took longer on its way than in its computation."""

    def note(self, *, computed: float, passed_on: float) -> None:
        """The seconds of a handover that is complete."""
        self._slow_at = self._clock() if passed_on > computed else None

    def pays(self) -> bool:
        """Whether to hand the next prompt over."""
        return self._slow_at is None or self._clock() - self._slow_at >= RETRY_SECONDS
