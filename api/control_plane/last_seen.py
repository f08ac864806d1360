"""The last known results of queries, used while the database is unavailable."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MAX_ENTRIES = 10_000


class _Seen(NamedTuple, Generic[Value]):
    value: Value
    at: float


class LastSeen(Generic[Key, Value]):
    """The last values, each for a bounded time; the oldest go first, and those that are too old."""

    def __init__(
        self,
        stale_seconds: float,
        *,
        max_entries: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stale_seconds = stale_seconds
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[Key, _Seen[Value]] = OrderedDict()

    def note(self, key: Key, value: Value) -> None:
        """Store a value that the database has just returned."""
        now = self._clock()
        self._entries[key] = _Seen(value, now)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries or self._is_stale(self._oldest(), now):
            self._entries.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Remove a value that the database has just denied."""
        self._entries.pop(key, None)

    def recall(self, key: Key) -> Value | None:
        """The value returned at most `stale_seconds` ago; None if there is none."""
        seen = self._entries.get(key)
        if seen is None or self._is_stale(seen, self._clock()):
            return None
        return seen.value

    def __len__(self) -> int:
        return len(self._entries)

    def _oldest(self) -> _Seen[Value]:
        return next(iter(self._entries.values()))

    def _is_stale(self, seen: _Seen[Value], now: float) -> bool:
        return now - seen.at > self._stale_seconds
