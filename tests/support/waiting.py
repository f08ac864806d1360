"""Waits for another process, with a timeout and no longer than necessary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

POLL_SECONDS = 0.02


def wait_for(probe: Callable[[], Value], *, seconds: float = 30.0) -> Value:
    """The first true value of `probe`. Fails if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := probe()):
        assert time.monotonic() < deadline, f"nothing came in {seconds} seconds"
        time.sleep(POLL_SECONDS)
    return value
