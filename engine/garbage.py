"""When Python looks for garbage in a process that must not pause.

Requests and their parts form no cycles: counting references frees them at once. What cycles there
are come from errors. Looking for them takes tens of milliseconds with a full prefix cache, so it
is done when nobody waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

IDLE_SECONDS = 5.0
"""So long after the last time, an idle process looks again."""
BUSY_SECONDS = 300.0
"""A process that is never idle looks at last."""


class GarbageCollection:
    """Python's own is off from now on, and what lives now is never looked at again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        gc.collect()
        gc.freeze()
        gc.disable()
        self._collected_at = clock()

    def collect_if_due(self, *, is_idle: bool) -> bool:
        """Call once per step; says whether it was."""
        interval = IDLE_SECONDS if is_idle else BUSY_SECONDS
        if self._clock() - self._collected_at < interval:
            return False
        gc.collect()
        self._collected_at = self._clock()
        return True
