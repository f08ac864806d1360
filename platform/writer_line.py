"""The line of those in this process who want to write to SQLite.

SQLite has one place for a writer, and lets the others poll for it in ever longer pauses: who has
just written takes the place again before the others look, and some wait until their patience ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import DatabaseBusy


class WriterLine:
    """Lets threads in one at a time, in the order in which they came."""

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
