"""Allocates contiguous extents of one array.

Every element is either free or in exactly one allocated extent, and adjacent free extents are
always merged. Sizes and offsets are in units that the owner chooses (the arena: elements).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Extent(NamedTuple):
    """The half-open range `[offset, offset + size)`."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    def overlaps(self, other: Extent) -> bool:
        return self.offset < other.end and other.offset < self.end

    def without(self, *others: Extent) -> list[Extent]:
        """The parts of this extent that do not overlap `others`, in order."""
        parts = [self]
        for other in others:
            parts = [rest for part in parts for rest in part._without_one(other)]
        return parts

    def _without_one(self, other: Extent) -> list[Extent]:
        if not self.overlaps(other):
            return [self]
        before = Extent(self.offset, other.offset - self.offset)
        after = Extent(other.end, self.end - other.end)
        return [part for part in (before, after) if part.size > 0]


class ExtentAllocator:
    """Best-fit allocator over `[0, capacity)`; offsets and sizes are multiples of `alignment`.

    A capacity that is no multiple is rounded down. Not thread-safe.
    """

    def __init__(self, capacity: int, *, alignment: int = 1) -> None:
        self.capacity = capacity - capacity % alignment
        self.alignment = alignment
        self.used = 0
        self._free = [Extent(0, self.capacity)] if self.capacity else []  # by offset
        self._allocated: set[Extent] = set()

    @property
    def largest_free(self) -> int:
        """The largest size that `allocate` can grant now."""
        return max((run.size for run in self._free), default=0)

    @property
    def num_free(self) -> int:
        return self.capacity - self.used

    @property
    def used_end(self) -> int:
        """Where the last allocated extent ends: `resize` can leave so little."""
        if self._free and self._free[-1].end == self.capacity:
            return self._free[-1].offset
        return self.capacity

    def allocate(self, size: int, *, avoid: Sequence[Extent] = ()) -> Extent | None:
        """Allocate the smallest sufficient free extent outside of `avoid`; None if there is none.

        The extent's size is `size` rounded up to the alignment.
        """
        assert size > 0, "an extent holds something"
        size = -(-size // self.alignment) * self.alignment
        gaps = [
            (gap.size, gap.offset, index)
            for index, run in enumerate(self._free)
            for gap in run.without(*avoid)
            if gap.size >= size
        ]
        if not gaps:
            return None
        _, offset, index = min(gaps)
        extent = Extent(offset, size)
        self._free[index : index + 1] = self._free[index].without(extent)
        self._allocated.add(extent)
        self.used += size
        return extent

    def free(self, extent: Extent) -> None:
        """Free exactly what `allocate` returned."""
        assert extent in self._allocated, f"{extent} is not allocated"
        self._allocated.remove(extent)
        self.used -= extent.size
        index = bisect(self._free, extent)
        start, end, first, last = extent.offset, extent.end, index, index
        if index > 0 and self._free[index - 1].end == start:
            start, first = self._free[index - 1].offset, index - 1
        if index < len(self._free) and self._free[index].offset == end:
            end, last = self._free[index].end, index + 1
        self._free[first:last] = [Extent(start, end - start)]

    def resize(self, capacity: int) -> None:
        """Add free units at the end, or take units away there, which must be free."""
        old, self.capacity = self.capacity, capacity - capacity % self.alignment
        last = self._free[-1] if self._free and self._free[-1].end == old else Extent(old, 0)
        assert last.offset <= self.capacity, "what is taken away is free"
        if last.size:
            self._free.pop()
        if self.capacity > last.offset:
            self._free.append(Extent(last.offset, self.capacity - last.offset))

    def check(self) -> None:
        """Assert that free and allocated extents tile the array and free neighbours are merged."""
        tiles = sorted([*self._free, *self._allocated])
        assert all(left.end == right.offset for left, right in pairwise(tiles))
        assert not tiles or (tiles[0].offset == 0 and tiles[-1].end == self.capacity)
        assert sum(tile.size for tile in tiles) == self.capacity
        assert self.used == sum(extent.size for extent in self._allocated)
        assert all(left.end < right.offset for left, right in pairwise(self._free))


class Placement(NamedTuple):
    """A place in the arena: an extent, and the table row that names it for one generation."""

    row: int
    generation: int
    extent: Extent
