"""Until when whose answer is wanted, whether the request waits or runs. Torch-free."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Protocol

SLACK = 64
"""Entries of ended requests that are kept at least, so that small heaps are never rebuilt."""


class HasDeadline(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def deadline(self) -> float | None: ...


class Deadlines:
    """The requests' ids by deadline. Those that ended meanwhile stay until they surface or, once
    they outnumber the others, until the heap is rebuilt."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._live: set[tuple[float, str]] = set()
        self.earliest = math.inf
        """No request expires before."""

    def add(self, request: HasDeadline) -> None:
        if request.deadline is None:
            return
        entry = (request.deadline, request.request_id)
        self._live.add(entry)
        heappush(self._heap, entry)
        self._note_earliest()

    def remove(self, request: HasDeadline) -> None:
        if request.deadline is None:
            return
        self._live.discard((request.deadline, request.request_id))
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
