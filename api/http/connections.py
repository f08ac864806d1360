"""Limits the number of connections, and chooses which idle one is closed for a new one."""

from __future__ import annotations

from typing import Protocol

OWN_PART = 4
"""This fraction of the open files (one in this number) is reserved for the server itself: its
database, uploads, processes."""
LATE_PART = 8
"""The limit is exceeded by this fraction (one in this number), and one, for connections that are
being told why they are closed."""


class Connection(Protocol):
    """A connection that can be asked to close."""

    def make_room(self, *, at_once: bool) -> None:
        """Close if no running request is lost. `at_once`: without a response."""


class Connections:
    """The open connections. Each is idle, or busy from the end of a request's head to the end of
    its response.

    If there are too many, the one that has been idle for longest is closed. Without free
    descriptors the server could open neither its database nor an upload.
    """

    def __init__(self, max_open: int) -> None:
        """`max_open`: the maximum number of open connections."""
        self._max_open = max_open
        self._num_open = 0
        self._idle: dict[Connection, None] = {}

    @classmethod
    def within(cls, num_files: int) -> Connections:
        """The limit for a process that may have this many open files."""
        return cls(num_files - num_files // OWN_PART)

    def open(self, connection: Connection) -> None:
        """Add a new, idle connection."""
        self._num_open += 1
        self._idle[connection] = None
        if self._num_open > self._max_open:
            longest = next(iter(self._idle))
            del self._idle[longest]
            most = self._max_open + 1 + self._max_open // LATE_PART
            longest.make_room(at_once=self._num_open > most)

    def work(self, connection: Connection) -> None:
        """A request has begun on it."""
        self._idle.pop(connection, None)

    def rest(self, connection: Connection) -> None:
        """All that was asked on it has been answered."""
        self._idle[connection] = None

    def close(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._num_open -= 1
        self._idle.pop(connection, None)
