"""Chooses which adapters to move to join free extents. Pure function, no side effects.

If enough elements are free but no single extent is large enough, moving an idle adapter costs one
copy within the device. Evicting it costs more, because it must be loaded again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .eviction import FREE, Occupant, in_line
from .extents import Extent
from .identity import AdapterKey

MAX_MOVED_PER_PLACED = 2
"""Maximum elements moved per element of room. Beyond this, copying is not worth it."""
MAX_TRIED_WINDOWS = 16
"""The number of windows to try; if the adapters in none of them can be moved, adapters are evicted
instead."""


class Compaction(NamedTuple):
    """The adapters `movers`, largest first, move out of `window` into other holes."""

    window: Extent
    movers: tuple[AdapterKey, ...]


def plan_compaction(
    size: int, *, capacity: int, occupants: Iterable[Occupant], avoid: Sequence[Extent] = ()
) -> Compaction | None:
    """The window of at least `size` that moves the fewest elements; None if there is none.

    An adapter with a cost may be moved; one whose cost is FREE is about to be removed. Nothing is
    moved into `avoid`. The engine's loop waits for the result, so only the cheapest windows are
    tried.
    """
    line = in_line(occupants, capacity=capacity, avoid=avoid)
    holes = [
        Extent(left.extent.end, right.extent.offset - left.extent.end)
        for left, right in pairwise(line)
        if right.extent.offset > left.extent.end
    ]
    if sum(hole.size for hole in holes) < size:
        return None
    windows = sorted(_windows(line, size), key=lambda window: window.num_moved)
    for window in windows[:MAX_TRIED_WINDOWS]:
        movers = [other for other in line[window.start : window.stop] if other.cost != FREE]
        movers.sort(key=lambda mover: mover.extent.size, reverse=True)
        elsewhere = [hole for hole in holes if not hole.overlaps(window.extent)]
        if _fit([mover.extent.size for mover in movers], elsewhere):
            keys = tuple(mover.key for mover in movers if mover.key is not None)
            return Compaction(window.extent, keys)
    return None


class _Window(NamedTuple):
    """The occupants `line[start:stop]` may all go, and leave `extent` if they do."""

    extent: Extent
    start: int
    stop: int
    num_moved: int
    """Elements."""


def _windows(line: list[Occupant], size: int) -> Iterator[_Window]:
    """The shortest window after each occupant, if it contains only movable ones."""
    moved = list(accumulate(map(_moved_elements, line), initial=0))
    stop = next_fixed = 0
    for start in range(1, len(line)):
        begin = line[start - 1].extent.end
        stop, next_fixed = max(stop, start), max(next_fixed, start)
        while stop < len(line) and line[stop].extent.offset - begin < size:
            stop += 1
        if stop == len(line):
            return
        while line[next_fixed].cost is not None:  # the last one may not move
            next_fixed += 1
        num_moved = moved[stop] - moved[start]
        if next_fixed >= stop and num_moved <= MAX_MOVED_PER_PLACED * size:
            extent = Extent(begin, line[stop].extent.offset - begin)
            yield _Window(extent, start, stop, num_moved)


def _moved_elements(occupant: Occupant) -> int:
    return 0 if occupant.cost is None or occupant.cost == FREE else occupant.extent.size


def _fit(sizes: list[int], holes: list[Extent]) -> bool:
    """Whether each mover fits into a hole. As the allocator does, each takes the smallest
    sufficient one."""
    free = sorted((hole.size, hole.offset) for hole in holes)
    for size in sizes:
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return False
        hole_size, offset = free.pop(index)
        if hole_size > size:
            insort(free, (hole_size - size, offset + size))
    return True
