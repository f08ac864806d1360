"""Which requests' times have come: those by which they must have ended, or must have begun.
Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

SLACK = 64
"""Entries of ended requests that are kept at least, so that small heaps are never rebuilt."""


class Timed(Protocol):
    @property
    def request_id(self) -> str: ...


Entry = TypeVar("Entry", bound=Timed)


class Deadlines(Generic[Entry]):
    """The requests' ids by a time of theirs. Those that ended meanwhile stay until they surface or,
    once they outnumber the others, until the heap is rebuilt."""

    def __init__(self, time_of: Callable[[Entry], float | None]) -> None:
        """`time_of`: a request's deadline, which never changes; None: it has none."""
        self._time_of = time_of
        self._heap: list[tuple[float, str]] = []
        self._live: set[tuple[float, str]] = set()
        self.earliest = math.inf
        """No request expires before."""

    def add(self, request: Entry) -> None:
        if (time := self._time_of(request)) is None:
            return
        entry = (time, request.request_id)
        self._live.add(entry)
        heappush(self._heap, entry)
        self._note_earliest()

    def remove(self, request: Entry) -> None:
        if (time := self._time_of(request)) is None:
            return
        self._live.discard((time, request.request_id))
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if entry in self._live]
            heapify(self._heap)
            self._note_earliest()

    def expired(self, now: float) -> list[str]:
        """Take out the requests whose deadline has come, earliest first."""
        request_ids = []
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            if entry in self._live:
                self._live.remove(entry)
                request_ids.append(entry[1])
        self._note_earliest()
        return request_ids

    def _note_earliest(self) -> None:
        self.earliest = self._heap[0][0] if self._heap else math.inf
