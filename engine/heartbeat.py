"""The heartbeat file: an engine's progress and current requests, readable even if the engine hangs.

The engine counts its progress and writes the request ids of the current step in a file that the
parent also maps. Writing never blocks and makes no system call. The parent can read the file while
the engine hangs and after it has died.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

_COUNTER_BYTES = 8
_LENGTH_BYTES = 8
_HEADER_BYTES = _COUNTER_BYTES + _LENGTH_BYTES
_FILE_BYTES = 64 << 10

SILENT_LOOKS = 20
"""The number of consecutive checks without progress that are a stall."""


class Heartbeat:
    """A counter and the request ids of one step."""

    def __init__(self, path: Path) -> None:
        """Map the file; it is created if it does not exist."""
        with path.open("a+b") as file:
            file.truncate(_FILE_BYTES)
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)

    def beat(self) -> None:
        """Count a progress event."""
        self._write_number(0, self.count + 1)

    def begin_step(self, request_ids: Iterable[str]) -> None:
        """Set the requests of the step that begins."""
        names = "\n".join(request_ids).encode()[: _FILE_BYTES - _HEADER_BYTES]
        self._write_number(_COUNTER_BYTES, 0)
        self._map[_HEADER_BYTES : _HEADER_BYTES + len(names)] = names
        self._write_number(_COUNTER_BYTES, len(names))
        self.beat()

    @property
    def count(self) -> int:
        """The number of progress events."""
        return self._read_number(0)

    @property
    def step_request_ids(self) -> frozenset[str]:
        """The requests of the step that began last, which may be over."""
        length = self._read_number(_COUNTER_BYTES)
        names = self._map[_HEADER_BYTES : _HEADER_BYTES + length].decode(errors="replace")
        return frozenset(names.split("\n")) if names else frozenset()

    def _read_number(self, offset: int) -> int:
        return int.from_bytes(self._map[offset : offset + 8], "little")

    def _write_number(self, offset: int, number: int) -> None:
        self._map[offset : offset + 8] = number.to_bytes(8, "little")


class StallWatch:
    """Distinguishes a stuck process from an idle or slow one.

    It counts checks, not seconds: a watcher that was delayed itself has not checked meanwhile, so
    it does not report its own delay as a stall.
    """

    def __init__(self) -> None:
        self._last_count = -1
        self._num_silent = 0

    def look(self, count: int, *, has_work: bool) -> bool:
        """Take the counter's value; True once the process is stuck."""
        is_silent = has_work and count == self._last_count
        self._last_count = count
        self._num_silent = self._num_silent + 1 if is_silent else 0
        return self._num_silent >= SILENT_LOOKS
