"""Room on the device: places blocks in the arena and displaces idle adapters for them.

Nobody starves: smaller adapters overtake one that does not fit for `PATIENCE_SECONDS` only. Then a
window of the arena is reserved for it. What lies there gets no new leases and goes when its last
lease ends, and no one else is placed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .block import PlacedExtra
from .eviction import Cost, Occupant, choose_window
from .extents import Extent, Placement
from .identity import AdapterKey
from .reading import BlockT, BlockT_contra
from .record import Record

PATIENCE_SECONDS = 4.0


class DeviceArena(Protocol[BlockT_contra]):
    """Device memory; `arena.Arena` states the contract."""

    @property
    def capacity(self) -> int: ...

    @property
    def element_bytes(self) -> int: ...

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        extras: Sequence[PlacedExtra] = (),
        *,
        avoid: Extent | None = None,
    ) -> Placement | None: ...

    def copy_into(self, placement: Placement, block: BlockT_contra) -> None: ...

    def publish(self, placement: Placement) -> None: ...

    def remove(self, row: int) -> None: ...


class _Reservation(NamedTuple):
    key: AdapterKey
    window: Extent


class Room(Generic[BlockT]):
    """The arena's occupants and who waits for their place."""

    def __init__(self, arena: DeviceArena[BlockT], clock: Callable[[], float]) -> None:
        self._arena = arena
        self._clock = clock
        self._occupants: dict[AdapterKey, Record[BlockT]] = {}
        self._reservation: _Reservation | None = None

    def place_in_order(self, waiting: list[Record[BlockT]]) -> list[Record[BlockT]]:
        """Give a placement to each of `waiting` for which there is, or can be made, room.

        Returns the adapters that were displaced: they are on the device no more.
        """
        displaced: list[Record[BlockT]] = []
        smallest_refused = self._num_reachable() + 1
        for record in sorted(waiting, key=_order):
            assert record.block is not None
            size = record.block.num_elements
            if size >= smallest_refused and not self._is_reserved_for(record):
                continue  # where a smaller one found no room there is none
            displaced += self._place(record, record.block)
            if record.placement is None:
                smallest_refused = min(smallest_refused, size)
        self._reserve_if_overdue([record for record in waiting if record.placement is None])
        return displaced

    def vacate(self, record: Record[BlockT]) -> None:
        """Take an adapter off the device, and off the list of those that wait for room."""
        assert not record.leases, "a leased adapter stays where it is"
        if record.placement is not None:
            self._arena.remove(record.placement.row)
            record.placement = None
            del self._occupants[record.key]
        if self._is_reserved_for(record):
            self._reservation = None

    def is_leaving(self, record: Record[BlockT]) -> bool:
        """Whether the adapter lies in the reserved window: nobody may lease it any more."""
        if self._reservation is None or record.placement is None:
            return False
        return record.placement.extent.overlaps(self._reservation.window)

    def _place(self, record: Record[BlockT], block: BlockT) -> list[Record[BlockT]]:
        is_reserved = self._is_reserved_for(record)
        avoid = self._reservation.window if self._reservation and not is_reserved else None
        displaced = self._leaving() if is_reserved else []
        self._vacate_all(displaced)
        if not self._occupy(record, block, avoid):
            victims = self._victims(block.num_elements, avoid)
            self._vacate_all(victims)
            displaced += victims
            is_placed = self._occupy(record, block, avoid)
            assert is_placed or not victims, "the window is free"
        return displaced

    def _reserve_if_overdue(self, waiting: list[Record[BlockT]]) -> None:
        """Reserve a window for the first of those that wait, once it waited too long."""
        first = min(waiting, key=_order, default=None)
        if first is None or first.block is None or self._reservation:
            return
        if self._clock() - first.waiting_since < PATIENCE_SECONDS:
            return
        window = choose_window(
            first.block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(_cost_to_drain),
        )
        assert window is not None, "everything can be drained"
        self._reservation = _Reservation(first.key, window.extent)

    def _occupy(self, record: Record[BlockT], block: BlockT, avoid: Extent | None) -> bool:
        record.placement = self._arena.place(
            record.key, block.num_elements, block.table, block.extras, avoid=avoid
        )
        if record.placement is None:
            return False
        self._occupants[record.key] = record
        if self._is_reserved_for(record):
            self._reservation = None
        return True

    def _vacate_all(self, records: list[Record[BlockT]]) -> None:
        for record in records:
            self.vacate(record)

    def _is_reserved_for(self, record: Record[BlockT]) -> bool:
        return self._reservation is not None and self._reservation.key == record.key

    def _leaving(self) -> list[Record[BlockT]]:
        return [
            record
            for record in self._occupants.values()
            if record.is_idle and self.is_leaving(record)
        ]

    def _num_reachable(self) -> int:
        """Elements that are free or held by adapters that may go now: nothing larger fits."""
        return self._arena.capacity - sum(
            occupant.extent.size
            for occupant in self._priced(self._cost_to_evict)
            if occupant.cost is None
        )

    def _victims(self, num_elements: int, avoid: Extent | None) -> list[Record[BlockT]]:
        occupants = self._priced(self._cost_to_evict)
        window = choose_window(
            num_elements, capacity=self._arena.capacity, occupants=occupants, avoid=avoid
        )
        return [self._occupants[key] for key in window.victims] if window else []

    def _priced(self, cost: Callable[[Record[BlockT]], Cost | None]) -> list[Occupant]:
        return [
            Occupant(record.placement.extent, record.key, cost(record))
            for record in self._occupants.values()
            if record.placement is not None
        ]

    def _cost_to_evict(self, record: Record[BlockT]) -> Cost | None:
        """Least recently used first, of those that may go now."""
        may_go = record.is_idle and self._clock() >= record.stays_until
        return record.last_used if may_go else None


def _order(record: Record[BlockT]) -> int:
    return record.order


def _cost_to_drain(record: Record[BlockT]) -> Cost:
    return record.last_used
