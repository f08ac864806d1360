"""Which adapters to move so that free runs join: a decision without effects.

When the free elements would do and no single run does, moving an idle adapter costs a copy within
the device; displacing it costs the same copy and more when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .eviction import FREE, Occupant, in_line
from .extents import Extent
from .identity import AdapterKey

MAX_MOVED_PER_PLACED = 2
"""Elements moved for each element of room that is made: beyond that it is not worth the copying."""


class Compaction(NamedTuple):
    """`movers`, largest first, leave `window` for holes elsewhere."""

    window: Extent
    movers: tuple[AdapterKey, ...]


def plan_compaction(
    size: int, *, capacity: int, occupants: Iterable[Occupant], avoid: Sequence[Extent] = ()
) -> Compaction | None:
    """The window of at least `size` that costs the fewest moved elements; None if there is none.

    An occupant with a cost may be moved, one whose cost is FREE is about to vanish. Nobody is moved
    into `avoid`.
    """
    line = in_line(occupants, capacity=capacity, avoid=avoid)
    holes = [
        Extent(left.extent.end, right.extent.offset - left.extent.end)
        for left, right in pairwise(line)
        if right.extent.offset > left.extent.end
    ]
    if sum(hole.size for hole in holes) < size:
        return None
    best: tuple[int, Compaction] | None = None
    for start in range(len(line) - 1):
        found = _window_from(line, start, size, holes)
        if found and (best is None or found[0] < best[0]):
            best = found
    return best[1] if best else None


def _window_from(
    line: list[Occupant], start: int, size: int, holes: list[Extent]
) -> tuple[int, Compaction] | None:
    """The shortest window behind `line[start]` and what it moves, if all of that fits elsewhere."""
    begin = line[start].extent.end
    movers: list[Occupant] = []
    for occupant in line[start + 1 :]:
        window = Extent(begin, occupant.extent.offset - begin)
        num_moved = sum(mover.extent.size for mover in movers)
        if num_moved > MAX_MOVED_PER_PLACED * size:
            return None
        if window.size >= size:
            movers.sort(key=lambda mover: mover.extent.size, reverse=True)
            if not _fit(movers, [hole for hole in holes if not hole.overlaps(window)]):
                return None
            keys = tuple(mover.key for mover in movers if mover.key is not None)
            return num_moved, Compaction(window, keys)
        if occupant.cost is None:
            return None
        if occupant.cost != FREE:
            movers.append(occupant)
    return None


def _fit(movers: list[Occupant], holes: list[Extent]) -> bool:
    """Whether each finds the tightest hole, as the allocator will choose it."""
    for mover in movers:
        size = mover.extent.size
        fitting = [hole for hole in holes if hole.size >= size]
        if not fitting:
            return False
        hole = min(fitting, key=lambda hole: (hole.size, hole.offset))
        holes.remove(hole)
        if hole.size > size:
            holes.append(Extent(hole.offset + size, hole.size - size))
    return True
