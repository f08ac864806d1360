"""Waits for what takes seconds or minutes, and looks rarely, so that looking is no load."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.5


def await_true(is_true: Callable[[], bool], seconds: float) -> None:
    """Return once it is true. Fails if it is not in time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"nothing came in {seconds} seconds"
        time.sleep(POLL_SECONDS)
