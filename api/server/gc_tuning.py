"""Schedules Python's garbage collector in a server.

Reference counting frees almost everything; cycles come from errors and cancelled tasks. Collecting
all objects that imports leave takes a fifth of a second, during which no stream continues, and by
default Python collects young objects every few requests.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG_OBJECTS = 10_000
"""Python collects young objects, which takes some ms, when this many more objects are allocated
than freed."""
PAUSE_SECONDS = 60.0
"""Between two collections of old objects. Python itself would collect them after a million
allocations, which is hours of ordinary requests."""
PATIENCE_SECONDS = 240.0
"""The maximum wait for a moment without requests."""
POLL_SECONDS = 0.05


def freeze_garbage() -> None:
    """Exclude the objects that exist now from collection; to be called once a server is up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


async def collect_garbage(is_idle: Callable[[], bool]) -> None:
    """Collect old objects regularly, until cancelled.

    `is_idle` tells whether no request runs, because a collection delays running requests.
    """
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        await _idle_moment(is_idle)
        gc.collect()


async def _idle_moment(is_idle: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_idle():
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return
