"""Chooses which adapters to evict to make room for one more. Pure function, no side effects.

An adapter needs one contiguous extent, so evicting the least recently used adapters one by one may
free many bytes without making room. Therefore the unit of choice is a window: neighbouring adapters
whose eviction leaves one extent that is large enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .extents import Extent
from .identity import AdapterKey


class Cost(NamedTuple):
    """The cost of evicting an occupant: first its rank, then its last use, or another order within
    a rank."""

    rank: int
    last_used: float


FREE = Cost(-1, 0.0)
"""The cost of an extent that is being zeroed and will be free without an eviction."""


class Occupant(NamedTuple):
    """An occupant of the arena; without a cost it may not be evicted.

    Without a key it is not an adapter that could be chosen for eviction.
    """

    extent: Extent
    key: AdapterKey | None
    cost: Cost | None


class Window(NamedTuple):
    """The hole that appears when `victims` go."""

    extent: Extent
    victims: tuple[AdapterKey, ...]
    cost: Cost
    """The cost of the most expensive victim."""


def choose_window(
    size: int,
    *,
    capacity: int,
    occupants: Iterable[Occupant],
    avoid: Sequence[Extent] = (),
) -> Window | None:
    """The window of at least `size` whose most expensive victim is cheapest, then the smallest one.

    There are no more victims than necessary. None if no window without an immovable occupant is
    large enough, or if the freed extent would touch one of `avoid`.
    """
    line = in_line(occupants, capacity=capacity, avoid=avoid)
    windows = [
        _window_from(line, start, size)
        for start, (left, right) in enumerate(pairwise(line))
        if right.cost is not None or right.extent.offset - left.extent.end >= size
    ]
    return min(filter(None, windows), key=_price, default=None)


def in_line(
    occupants: Iterable[Occupant], *, capacity: int, avoid: Sequence[Extent] = ()
) -> list[Occupant]:
    """Occupants by offset between immovable ends; each of `avoid`, and all in it, is immovable.

    An occupant never crosses the boundary of one of `avoid`, which was a window itself.
    """
    outside = [
        occupant
        for occupant in occupants
        if not any(occupant.extent.overlaps(extent) for extent in avoid)
    ]
    fixed = [Extent(0, 0), Extent(capacity, 0), *avoid]
    return sorted(
        [*outside, *(Occupant(extent, None, None) for extent in fixed)],
        key=lambda occupant: occupant.extent,
    )


def _price(window: Window) -> tuple[Cost, int, int]:
    return window.cost, window.extent.size, window.extent.offset


def _window_from(line: list[Occupant], start: int, size: int) -> Window | None:
    """The shortest window that begins after `line[start]`."""
    begin = line[start].extent.end
    cost = FREE
    victims: list[AdapterKey] = []
    for occupant in line[start + 1 :]:
        hole = Extent(begin, occupant.extent.offset - begin)
        if hole.size >= size:
            return Window(hole, tuple(victims), cost)
        if occupant.cost is None:
            return None
        cost = max(cost, occupant.cost)
        if occupant.key is not None:
            victims.append(occupant.key)
    return None
