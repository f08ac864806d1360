"""The order in which waiting requests will need their adapters.

An adapter with a waiting request is evicted only for one that is needed sooner, and only if that
one is needed soon: the order changes with every step, so needs that are further away justify no
load. An adapter without waiting requests may be evicted for any other.

Only as many loads start as requests may run soon. So a tenant that names a thousand adapters has no
more transfers and files on this machine than its requests can use next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .identity import AdapterKey

NextUseRank = tuple[int, int]
"""The rank of a waiting adapter; smaller is sooner: its eviction distance, then its arrival."""


class NextUses:
    """The adapters that waiting requests need, in the order of their next use."""

    def __init__(self, num_soon: int, clock: Callable[[], float]) -> None:
        """`num_soon`: the number of adapters whose next use is soon."""
        assert num_soon >= 1
        self.num_soon = num_soon
        self._clock = clock
        self._positions: dict[AdapterKey, int] = {}
        self._near: set[AdapterKey] = set()
        self._far: deque[AdapterKey] = deque()
        """By position. May contain adapters that no request waits for any more."""
        self._soon_since: dict[AdapterKey, float] = {}

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._positions)

    def __iter__(self) -> Iterator[AdapterKey]:
        """The adapter that is needed first comes first."""
        return iter(self._positions)

    def set(self, keys: Iterable[AdapterKey]) -> None:
        """Replace the order; the adapter that is needed first comes first."""
        now = self._clock()
        self._positions = {key: position for position, key in enumerate(keys)}
        self._near, self._far = set(), deque(self._positions)
        self._fill_near()
        self._soon_since = {key: self._soon_since.get(key, now) for key in self.next()}

    def add(self, key: AdapterKey) -> None:
        """Another request needs this adapter: it is ranked last, unless it already has a rank."""
        if key in self._positions:
            return
        self._positions[key] = next(reversed(self._positions.values()), -1) + 1
        self._far.append(key)
        self._fill_near()

    def remove(self, key: AdapterKey) -> None:
        """No request waits for it: one has it now and keeps it by its lease, or all have failed."""
        self._positions.pop(key, None)
        self._near.discard(key)
        self._fill_near()

    def next(self) -> list[AdapterKey]:
        """The adapters whose next use is soon."""
        return [key for key, position in self._positions.items() if position < self.num_soon]

    def may_begin(self, key: AdapterKey) -> bool:
        """Whether its load may begin: fewer than `num_soon` adapters are needed before it."""
        return key in self._near or (key not in self._positions and len(self._near) < self.num_soon)

    def position(self, key: AdapterKey) -> int | None:
        """The number of adapters that are needed before it; None: no request waits for it."""
        return self._positions.get(key)

    def distance(self, key: AdapterKey) -> int:
        """Its position, at most `num_soon`; one more than that if no request waits for it."""
        position = self._positions.get(key)
        if position is None:
            return self.num_soon + 1
        return min(self.num_soon, position)

    def eviction_distance(self, key: AdapterKey) -> int:
        """Adapters with a greater distance than this may be evicted for the adapter."""
        return min(self.num_soon, self.distance(key))

    def soon_since(self, key: AdapterKey) -> float | None:
        """Since when its next use is soon; None if it is not."""
        return self._soon_since.get(key)

    def _fill_near(self) -> None:
        while self._far and len(self._near) < self.num_soon:
            key = self._far.popleft()
            if key in self._positions:
                self._near.add(key)
