"""How long the adapters that requests wait for will take to be loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...adapters.status import AdapterTierStats

WINDOW_SECONDS = 30.0
"""Loading before this time counts for less and less."""


class LoadPace:
    """Measures the pace of one engine while requests wait for adapters.

    Example: if 200 MB were loaded in 2 s, 300 MB are a backlog of 3 s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = AdapterTierStats()
        self._looked_at = clock()
        self._seconds = 0.0
        """For which requests have waited for adapters."""
        self._loaded_bytes = 0.0
        """In this time."""

    def add(self, tiers: AdapterTierStats) -> None:
        """Take the engine's next statistics."""
        if self._last.awaited_bytes:
            seconds = self._waited_seconds()
            loaded_bytes = self._loaded_bytes + tiers.loaded_bytes - self._last.loaded_bytes
            kept = min(1.0, WINDOW_SECONDS / seconds) if seconds else 1.0
            self._seconds, self._loaded_bytes = kept * seconds, kept * loaded_bytes
        self._last, self._looked_at = tiers, self._clock()

    def backlog_seconds(self) -> float:
        """Time to load what requests wait for. While nothing was loaded, the time that they have
        waited."""
        if not self._last.awaited_bytes:
            return 0.0
        seconds = self._waited_seconds()
        if not self._loaded_bytes:
            return seconds
        return seconds * self._last.awaited_bytes / self._loaded_bytes

    def _waited_seconds(self) -> float:
        return self._seconds + self._clock() - self._looked_at
