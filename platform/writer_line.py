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


class WriterLine:
    """Admits one thread at a time, in order of arrival."""

    def __init__(self, patience_seconds: float) -> None:
        """`patience_seconds`: how long a thread waits for its turn."""
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._turns: deque[threading.Event] = deque()
        """Set is the first alone."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only one. Raises DatabaseBusy after the patience."""
        mine = threading.Event()
        with self._lock:
            self._turns.append(mine)
            self._let_in()
        try:
            if not mine.wait(self._patience_seconds):
                raise DatabaseBusy
            yield
        finally:
            with self._lock:
                self._turns.remove(mine)
                self._let_in()

    def _let_in(self) -> None:
        if self._turns:
            self._turns[0].set()
