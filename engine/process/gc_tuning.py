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
"""So long after the last time, an idle process looks again."""
BUSY_SECONDS = 300.0
"""A process that is never idle looks at last."""
RETURN_SECONDS = 60.0
"""Freed memory is given back at most so often: the next steps take some of it again."""


class GarbageCollection:
    """Python's own is off from now on, and what lives now is never looked at again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        gc.collect()
        gc.freeze()
        gc.disable()
        self._collected_at = self._returned_at = clock()

    def collect_if_due(self, *, is_idle: bool) -> bool:
        """Call once per step; says whether it was."""
        interval = IDLE_SECONDS if is_idle else BUSY_SECONDS
        if self._clock() - self._collected_at < interval:
            return False
        gc.collect()
        if self._clock() - self._returned_at >= RETURN_SECONDS:
            return_freed_memory()
            self._returned_at = self._clock()
        self._collected_at = self._clock()
        return True
