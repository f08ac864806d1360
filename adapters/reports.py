"""What residency tells about itself: where every adapter is, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple

from .arena_planner import ArenaPlanner
from .extents import Extent
from .histories import Transition
from .identity import AdapterKey
from .leases import Leases
from .load_times import Histogram
from .loads import Loads
from .memories import BlockT, DeviceArena, Host
from .pins import Pins
from .record import Departure, Failure, Record, State
from .records import Records
from .retirements import DELETED, DELETING, Retirements
from .tier import Tier


class AdapterStatus(NamedTuple):
    """One adapter in a snapshot."""

    key: AdapterKey
    tier: Tier
    device_bytes: int
    num_leases: int


class Explanation(NamedTuple):
    """Where an adapter is and what it waits for; times are readings of residency's clock."""

    key: AdapterKey
    now: float
    state: str
    """A State or DELETING."""
    tier: Tier
    since: float | None
    failure: Failure | None
    retry_at: float | None
    order: int
    """Loads ahead of it."""
    needed_bytes: int | None
    free_bytes: int
    largest_free_bytes: int
    leased_bytes: int
    is_pinned: bool
    transitions: tuple[Transition, ...]


class ExtentStatus(NamedTuple):
    """One adapter's place in the arena."""

    key: AdapterKey
    offset_bytes: int
    num_bytes: int
    state: str
    """`leased`, `idle` or `loading`."""
    is_pinned: bool
    num_leases: int
    idle_seconds: float
    """Since it was last used; 0 while it is leased or on its way."""
    eviction_order: int | None
    """0 for who would make room first; None for who stays."""


class HostStatus(NamedTuple):
    """One adapter's block in host memory."""

    key: AdapterKey
    num_bytes: int
    is_pinned: bool
    is_in_use: bool


class Figures(NamedTuple):
    """What residency counts and holds."""

    device_bytes: int
    host_bytes: int
    num_leases: int
    leased_bytes: int
    pinned_bytes: int
    free_bytes: int
    largest_free_bytes: int
    evictions: dict[Departure, int]
    num_leases_reaped: int
    num_moves: int
    moved_bytes: int
    load_seconds: dict[str, Histogram]


class Reports(Generic[BlockT]):
    """Reads the parts of residency and changes none."""

    def __init__(
        self,
        *,
        arena: DeviceArena[BlockT],
        host: Host[BlockT],
        records: Records[BlockT],
        planner: ArenaPlanner[BlockT],
        loads: Loads[BlockT],
        leases: Leases,
        pins: Pins,
        retirements: Retirements[BlockT],
        clock: Callable[[], float],
    ) -> None:
        self._arena = arena
        self._host = host
        self._records = records
        self._planner = planner
        self._loads = loads
        self._leases = leases
        self._pins = pins
        self._retirements = retirements
        self._clock = clock

    def tier(self, key: AdapterKey) -> Tier:
        """The fastest tier of the engine that has the adapter; STORE if none has."""
        record = self._records.get(key)
        if record is not None and record.state is State.RESIDENT:
            return Tier.DEVICE
        if self._host.holds(key):
            return Tier.HOST
        return Tier.DISK if record is not None and record.state is State.READING else Tier.STORE

    def failure(self, key: AdapterKey) -> Failure | None:
        """Why the adapter cannot be had now, if it is known."""
        if key in self._retirements:
            return DELETED
        record = self._records.get(key)
        return record.failure if record is not None else None

    def snapshot(self) -> list[AdapterStatus]:
        """Every adapter that is in memory, requested or failed; most recently used first."""
        records = sorted(self._records, key=_recency, reverse=True)
        keys = dict.fromkeys([*(record.key for record in records), *self._host.keys()])
        return [self._status(key) for key in keys]

    def extents(self) -> list[ExtentStatus]:
        """Every adapter that has a place in the arena, by offset."""
        order = {key: position for position, key in enumerate(self._planner.eviction_order())}
        now = self._clock()
        return sorted(
            (
                self._extent_status(record, record.placement.extent, now, order.get(record.key))
                for record in self._records
                if record.placement is not None
            ),
            key=lambda status: status.offset_bytes,
        )

    def host_entries(self) -> list[HostStatus]:
        """Every adapter in host memory, least recently used first."""
        keys = self._host.keys()
        in_use = {record.key for record in self._records if record.block is not None}
        return [
            HostStatus(key, self._host.size_of(key), key in self._pins, key in in_use)
            for key in keys
        ]

    def explain(self, key: AdapterKey) -> Explanation:
        """Why an adapter is where it is."""
        histories = self._records.histories
        record, last = self._records.get(key), histories.last(key)
        unit = self._arena.element_bytes
        needed = record.num_elements if record is not None else None
        state = record.state if record is not None else State.STORED
        return Explanation(
            key=key,
            now=self._clock(),
            state=DELETING if key in self._retirements else state.value,
            tier=self.tier(key),
            since=last.at if last else None,
            failure=self.failure(key),
            retry_at=record.retry_at if record and record.failure else None,
            order=self._num_ahead(record) if record else 0,
            needed_bytes=None if needed is None else needed * unit,
            free_bytes=self._arena.num_free * unit,
            largest_free_bytes=self._arena.largest_free * unit,
            leased_bytes=self._leases.elements * unit,
            is_pinned=key in self._pins,
            transitions=histories.of(key),
        )

    def figures(self) -> Figures:
        unit = self._arena.element_bytes
        pinned = sum(record.num_placed for record in self._records if record.key in self._pins)
        return Figures(
            device_bytes=(self._arena.capacity - self._arena.num_free) * unit,
            host_bytes=self._host.used_bytes,
            num_leases=len(self._leases),
            leased_bytes=self._leases.elements * unit,
            pinned_bytes=pinned * unit,
            free_bytes=self._arena.num_free * unit,
            largest_free_bytes=self._arena.largest_free * unit,
            evictions=dict(self._loads.departures),
            num_leases_reaped=self._leases.num_reaped,
            num_moves=self._planner.num_moves,
            moved_bytes=self._planner.num_moved_elements * unit,
            load_seconds=self._records.load_times.snapshot(),
        )

    def _num_ahead(self, record: Record[BlockT]) -> int:
        """Loads that began earlier and are not over, if this one is not."""
        ended = (State.RESIDENT, State.FAILED)
        if record.state in ended:
            return 0
        return sum(
            other.order < record.order and other.state not in ended for other in self._records
        )

    def _extent_status(
        self, record: Record[BlockT], extent: Extent, now: float, order: int | None
    ) -> ExtentStatus:
        is_resident = record.state is State.RESIDENT
        is_idle = is_resident and not record.leases
        return ExtentStatus(
            key=record.key,
            offset_bytes=extent.offset * self._arena.element_bytes,
            num_bytes=extent.size * self._arena.element_bytes,
            state="idle" if is_idle else "leased" if is_resident else "loading",
            is_pinned=record.key in self._pins,
            num_leases=len(record.leases),
            idle_seconds=max(0.0, now - record.last_used) if is_idle else 0.0,
            eviction_order=order,
        )

    def _status(self, key: AdapterKey) -> AdapterStatus:
        record = self._records.get(key)
        num_bytes = record.num_placed * self._arena.element_bytes if record else 0
        return AdapterStatus(key, self.tier(key), num_bytes, len(record.leases) if record else 0)


def _recency(record: Record[BlockT]) -> tuple[bool, float]:
    return bool(record.leases), record.last_used
