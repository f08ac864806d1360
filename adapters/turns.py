"""In which order the waiting requests will need their adapters.

An adapter that a request waits for gives its place only to one that is needed sooner, and only if
that one is needed soon: the order changes with every step, and further ahead it is no reason to
load anything. What no request waits for gives its place to anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .identity import AdapterKey

Urgency = tuple[int, int]
"""Of an adapter that waits; the less, the sooner: its reach, then when it was asked for."""


class Turns:
    """The adapters' turns, the next one first."""

    def __init__(self, num_soon: int, clock: Callable[[], float]) -> None:
        """`num_soon`: of so many adapters the turn is soon."""
        assert num_soon >= 1
        self.num_soon = num_soon
        self._clock = clock
        self._turns: dict[AdapterKey, int] = {}
        self._soon_since: dict[AdapterKey, float] = {}

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._turns)

    def set(self, keys: Iterable[AdapterKey]) -> None:
        """Replace all turns; the next one first."""
        now = self._clock()
        self._turns = {key: turn for turn, key in enumerate(keys)}
        self._soon_since = {key: self._soon_since.get(key, now) for key in self.next()}

    def add(self, key: AdapterKey) -> None:
        """A request names this one too: behind all others, unless it had a turn before."""
        last = next(reversed(self._turns.values()), -1)
        self._turns.setdefault(key, last + 1)

    def remove(self, key: AdapterKey) -> None:
        """A request that waited for it has it now, and keeps it by its lease."""
        self._turns.pop(key, None)

    def next(self) -> list[AdapterKey]:
        """Those whose turn is soon."""
        return [key for key, turn in self._turns.items() if turn < self.num_soon]

    def of(self, key: AdapterKey) -> int | None:
        """How many are needed before it; None: no request waits for it."""
        return self._turns.get(key)

    def distance(self, key: AdapterKey) -> int:
        """Up to `num_soon` by the turn, and one more if no request waits for it."""
        turn = self._turns.get(key)
        return self.num_soon + 1 if turn is None else min(self.num_soon, turn)

    def reach(self, key: AdapterKey) -> int:
        """Whose distance is greater than this may be displaced for the adapter."""
        return min(self.num_soon, self.distance(key))

    def soon_since(self, key: AdapterKey) -> float | None:
        """Since when its turn is soon; None if it is not."""
        return self._soon_since.get(key)
