"""The order in which waiting requests will need their adapters.

An adapter with a waiting request is evicted only for one that is needed sooner, and only if that
one is needed soon: the order changes with every step, so needs that are further away justify no
load. An adapter without waiting requests may be evicted for any other.

Only as many loads start as requests may run soon. So a tenant that names a thousand adapters has no
more transfers and files on this machine than its requests can use next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from .identity import AdapterKey

NextUseRank = tuple[int, int]
"""The rank of a waiting adapter; smaller is sooner: its reach, then its arrival."""


class NextUses:
    """The adapters' turns, the next one first."""

    def __init__(self, num_soon: int, clock: Callable[[], float]) -> None:
        """`num_soon`: the number of adapters whose next use is soon."""
        assert num_soon >= 1
        self.num_soon = num_soon
        self._clock = clock
        self._turns: dict[AdapterKey, int] = {}
        self._near: set[AdapterKey] = set()
        self._far: deque[AdapterKey] = deque()
        """In their order; some may have no turn any more."""
        self._soon_since: dict[AdapterKey, float] = {}

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._turns)

    def set(self, keys: Iterable[AdapterKey]) -> None:
        """Replace all turns; the next one first."""
        now = self._clock()
        self._turns = {key: turn for turn, key in enumerate(keys)}
        self._near, self._far = set(), deque(self._turns)
        self._fill_near()
        self._soon_since = {key: self._soon_since.get(key, now) for key in self.next()}

    def add(self, key: AdapterKey) -> None:
        """Another request needs this adapter: it is ranked last, unless it already has a rank."""
        if key in self._turns:
            return
        self._turns[key] = next(reversed(self._turns.values()), -1) + 1
        self._far.append(key)
        self._fill_near()

    def remove(self, key: AdapterKey) -> None:
        """No request waits for it: one has it now and keeps it by its lease, or all have failed."""
        self._turns.pop(key, None)
        self._near.discard(key)
        self._fill_near()

    def next(self) -> list[AdapterKey]:
        """The adapters whose next use is soon."""
        return [key for key, turn in self._turns.items() if turn < self.num_soon]

    def may_begin(self, key: AdapterKey) -> bool:
        """Whether its load may begin: less than `num_soon` others wait that are needed before."""
        return key in self._near or (key not in self._turns and len(self._near) < self.num_soon)

    def of(self, key: AdapterKey) -> int | None:
        """The number of adapters that are needed before it; None: no request waits for it."""
        return self._turns.get(key)

    def distance(self, key: AdapterKey) -> int:
        """Up to `num_soon` by the turn, and one more if no request waits for it."""
        turn = self._turns.get(key)
        return self.num_soon + 1 if turn is None else min(self.num_soon, turn)

    def reach(self, key: AdapterKey) -> int:
        """Adapters with a greater distance than this may be evicted for the adapter."""
        return min(self.num_soon, self.distance(key))

    def soon_since(self, key: AdapterKey) -> float | None:
        """Since when its turn is soon; None if it is not."""
        return self._soon_since.get(key)

    def _fill_near(self) -> None:
        while self._far and len(self._near) < self.num_soon:
            key = self._far.popleft()
            if key in self._turns:
                self._near.add(key)
