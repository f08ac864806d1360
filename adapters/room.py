"""Room on the device: places blocks in the arena and displaces idle adapters for them.

Nobody starves: smaller adapters overtake one that does not fit for `PATIENCE_SECONDS` only. Then a
window of the arena is reserved for it. What lies there gets no new leases and goes when its last
lease ends, and no one else is placed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

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

    def place(self, record: Record[BlockT], block: BlockT) -> tuple[Record[BlockT], ...]:
        """Give `record` a placement if there is, or can be made, room for its block.

        Returns the adapters that were displaced: they are on the device no more.
        """
        assert record.placement is None
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
        return tuple(displaced)

    def vacate(self, record: Record[BlockT]) -> None:
        """Take an adapter off the device, and off the list of those that wait for room."""
        assert not record.leases, "a leased adapter stays where it is"
        if record.placement is not None:
            self._arena.remove(record.placement.row)
            record.placement = None
            del self._occupants[record.key]
        if self._is_reserved_for(record):
            self._reservation = None

    def precedence(self, record: Record[BlockT]) -> tuple[bool, int]:
        """Sort key of those that wait: in the order of requests, but a reserved window first."""
        return not self._is_reserved_for(record), record.order

    def reserve_if_overdue(self, record: Record[BlockT]) -> None:
        """Reserve a window for the first of those that wait, once it waited too long."""
        assert record.block is not None
        if self._reservation or self._clock() - record.waiting_since < PATIENCE_SECONDS:
            return
        window = choose_window(
            record.block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(_cost_to_drain),
        )
        assert window is not None, "everything can be drained"
        self._reservation = _Reservation(record.key, window.extent)

    def is_leaving(self, record: Record[BlockT]) -> bool:
        """Whether the adapter lies in the reserved window: nobody may lease it any more."""
        if self._reservation is None or record.placement is None:
            return False
        return record.placement.extent.overlaps(self._reservation.window)

    def _occupy(self, record: Record[BlockT], block: BlockT, avoid: Extent | None) -> bool:
        record.placement = self._arena.place(
            record.key, block.num_elements, block.table, avoid=avoid
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

    def _victims(self, num_elements: int, avoid: Extent | None) -> list[Record[BlockT]]:
        window = choose_window(
            num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(self._cost_to_evict),
            avoid=avoid,
        )
        return [self._occupants[key] for key in window.victims] if window else []

    def _priced(self, cost: Callable[[Record[BlockT]], Cost | None]) -> Iterator[Occupant]:
        for record in self._occupants.values():
            assert record.placement is not None
            yield Occupant(record.placement.extent, record.key, cost(record))

    def _cost_to_evict(self, record: Record[BlockT]) -> Cost | None:
        """Least recently used first, of those that may go now."""
        may_go = record.is_idle and self._clock() >= record.stays_until
        return (0, record.last_used) if may_go else None


def _cost_to_drain(record: Record[BlockT]) -> Cost:
    """Idle ones before those in use."""
    return (0 if record.is_idle else 1, record.last_used)
