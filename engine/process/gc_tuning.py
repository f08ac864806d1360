"""Runs Python's garbage collector and returns freed memory when the process is idle.

Requests and their parts form no cycles, so reference counting frees them at once; cycles come from
errors. A collection takes tens of milliseconds with a full prefix cache, and so does returning
freed memory to the system, so both run when no request waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from ...adapters.malloc import return_freed_memory

IDLE_SECONDS = 5.0
"""The interval of collections in an idle process."""
BUSY_SECONDS = 300.0
"""A process that is never idle collects after this time."""
RETURN_SECONDS = 60.0
"""The minimum interval of returning freed memory, because the next steps reuse some of it."""


class GarbageCollection:
    """Disables Python's automatic collection, freezes the existing objects, and returns the memory
    that the start has freed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        gc.collect()
        gc.freeze()
        gc.disable()
        return_freed_memory()
        self._collected_at = self._returned_at = clock()

    def collect_if_due(self, *, is_idle: bool) -> bool:
        """Call once per step; returns whether it collected."""
        interval = IDLE_SECONDS if is_idle else BUSY_SECONDS
        if self._clock() - self._collected_at < interval:
            return False
        gc.collect()
        if self._clock() - self._returned_at >= RETURN_SECONDS:
            return_freed_memory()
            self._returned_at = self._clock()
        self._collected_at = self._clock()
        return True
