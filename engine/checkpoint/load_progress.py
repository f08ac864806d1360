"""How far the load of a base is: a progress bar on a terminal, log lines anywhere else."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAR_SECONDS = 0.1
LINE_SECONDS = 10.0
"""The time between two log lines of one stage."""
_WIDTH = 30

_log = logging.getLogger(__name__)


@contextmanager
def report_progress(stage: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function that reports one more of `total` parts as done. Any thread may call it.

    A stage that ends at once shows nothing.
    """
    is_terminal = sys.stderr.isatty()
    progress = _Progress(
        lambda num_done: (_draw if is_terminal else _write)(stage, num_done, total),
        BAR_SECONDS if is_terminal else LINE_SECONDS,
    )
    try:
        yield progress.advance
    finally:
        if is_terminal and progress.has_shown:
            _put("\r\033[K")


class _Progress:
    """Shows the number of parts that are done, at most once in `every_seconds`."""

    def __init__(self, show: Callable[[int], None], every_seconds: float) -> None:
        self.has_shown = False
        self._show = show
        self._every_seconds = every_seconds
        self._lock = threading.Lock()
        self._num_done = 0
        self._shown_at = time.monotonic()

    def advance(self) -> None:
        with self._lock:
            self._num_done += 1
            now = time.monotonic()
            if now >= self._shown_at + self._every_seconds:
                self._shown_at = now
                self.has_shown = True
                self._show(self._num_done)


def _draw(stage: str, num_done: int, total: int) -> None:
    bar = ("#" * (_WIDTH * num_done // total)).ljust(_WIDTH, ".")
    _put(f"\r{stage} [{bar}] {num_done}/{total}")


def _write(stage: str, num_done: int, total: int) -> None:
    extra = {"stage": stage, "num_done": num_done, "total": total}
    _log.info("base_loading", extra=extra)


def _put(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
