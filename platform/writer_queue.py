"""A queue for the threads of this process that write to SQLite.

SQLite has one writer at a time, and other writers poll for it at growing intervals. Without the
queue, the thread that has just written takes the lock again before others poll, and some wait until
their timeout.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import DatabaseBusy


class WriterQueue:
    """Admits one thread at a time, in order of arrival."""

    def __init__(self, patience_seconds: float) -> None:
        """`patience_seconds`: how long a thread waits at most."""
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        """An event per thread; only the first is set."""

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Wait to be the only writer, and stay it in the block. Raises DatabaseBusy."""
        mine = threading.Event()
        with self._lock:
            self._waiting.append(mine)
            self._admit_first()
        try:
            if not mine.wait(self._patience_seconds):
                raise DatabaseBusy
            yield
        finally:
            with self._lock:
                self._waiting.remove(mine)
                self._admit_first()

    def _admit_first(self) -> None:
        if self._waiting:
            self._waiting[0].set()
