"""A follower's arena: places are rank 0's decisions."""

from __future__ import annotations

from ...adapters.arena import Arena
from ...adapters.extents import Extent, Placement
from ...adapters.host_cache import HostBlock
from ..errors import StaleExtent


class FollowerArena(Arena):
    """An arena whose rows and extents are chosen elsewhere. Raises StaleExtent if one of its
    adapters is not within its capacity."""

    def resize(self, capacity: int) -> None:
        """See `Arena.resize`."""
        for occupant in self._occupants.values():
            _check_within(occupant.extent, capacity)
        super().resize(capacity)

    def occupy(self, placement: Placement, block: HostBlock) -> None:
        """Note the place of a block. Its row stays invisible until `publish`."""
        self._make_room(placement)
        self._occupy(placement, block.key, block.table, block.auxiliary, block.vocab_size)

    def occupy_again(self, row: int, placement: Placement) -> None:
        """Note a second place for the adapter of a row."""
        self._make_room(placement)
        self._occupy_again(placement, self._occupants[row])

    def free(self, placement: Placement) -> None:
        """Forget an erased place."""
        self._let_go(placement)

    def _make_room(self, placement: Placement) -> None:
        _check_within(placement.extent, self.capacity)
        while placement.row >= len(self._generations):
            self._double_rows()


def _check_within(extent: Extent, capacity: int) -> None:
    if extent.end > capacity:
        raise StaleExtent
