"""What a caller is told while files are transferred."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("loraplex.client")


class Progress:
    """Messages go to Python's log, and the progress of transfers is not shown."""

    def note(self, message: str) -> None:
        """What is good to know."""
        _log.info(message)

    def warn(self, message: str) -> None:
        """What the caller should know."""
        _log.warning(message)

    @contextmanager
    def transfer(self, name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """One file on its way; the function takes the bytes that have arrived so far."""
        yield lambda _num_bytes: None
