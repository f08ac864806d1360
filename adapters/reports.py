"""Reports on the adapter manager's state: the position of every adapter, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from .arena_planner import ArenaPlanner
from .demand import Demand
from .extents import Extent
from .identity import AdapterKey
from .leases import Leases
from .loads import Loads
from .memories import BlockT, DeviceArena, Host
from .record import Failure, Record, State
from .records import Records
from .retirements import DELETED, DELETING, Retirements
from .status import (
    AdapterChanges,
    AdapterLoad,
    AdapterStatus,
    AdapterTierStats,
    AdapterTransition,
    ExtentUse,
    HostUse,
)
from .tier import Tier


class Reports(Generic[BlockT]):
    """Reads the adapter manager's parts and changes none."""

    def __init__(
        self,
        *,
        arena: DeviceArena[BlockT],
        host: Host[BlockT],
        records: Records[BlockT],
        planner: ArenaPlanner[BlockT],
        loads: Loads[BlockT],
        leases: Leases,
        demand: Demand,
        retirements: Retirements[BlockT],
        clock: Callable[[], float],
    ) -> None:
        self._arena = arena
        self._host = host
        self._records = records
        self._planner = planner
        self._loads = loads
        self._leases = leases
        self._pins = demand.pins
        self._next_uses = demand.next_uses
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
        """Why the adapter cannot be loaded now, if it is known."""
        if key in self._retirements:
            return DELETED
        record = self._records.get(key)
        return record.failure if record is not None else None

    def snapshot(self) -> list[AdapterStatus]:
        """Every adapter that is in memory, requested or failed; most recently used first."""
        records = sorted(self._records, key=_recency, reverse=True)
        keys = dict.fromkeys([*(record.key for record in records), *self._host.keys()])
        return [self._status(key) for key in keys]

    def take_changes(self) -> AdapterChanges:
        """What has changed in `snapshot` since the last call. One caller may ask."""
        changed = self._records.changed
        keys = [*changed, *self._host.take_changed()]
        changed.clear()
        records, statuses, gone = [], [], []
        for key in dict.fromkeys(keys):
            if (record := self._records.get(key)) is not None:
                records.append(record)
            elif self._host.holds(key):
                statuses.append(self._status(key))
            else:
                gone.append(key)
        records.sort(key=_recency, reverse=True)
        return AdapterChanges([*(self._status(each.key) for each in records), *statuses], gone)

    def extents(self) -> list[ExtentUse]:
        """Every adapter that has a place in the arena, by offset."""
        order = {key: position for position, key in enumerate(self._planner.eviction_order())}
        now = self._clock()
        return sorted(
            (
                self._extent_use(record, record.placement.extent, now, order.get(record.key))
                for record in self._records
                if record.placement is not None
            ),
            key=lambda use: use.offset_bytes,
        )

    def host_entries(self) -> list[HostUse]:
        """Every adapter in host memory, least recently used first."""
        keys = self._host.keys()
        in_use = {record.key for record in self._records if record.block is not None}
        return [
            HostUse(key, self._host.size_of(key), key in self._pins, key in in_use) for key in keys
        ]

    def explain(self, key: AdapterKey) -> AdapterLoad:
        """Why an adapter is where it is."""
        histories = self._records.histories
        record, last = self._records.get(key), histories.last(key)
        now, unit = self._clock(), self._arena.element_bytes
        needed = record.num_elements if record is not None else None
        state = record.state if record is not None else State.STORED
        return AdapterLoad(
            key=key,
            state=DELETING if key in self._retirements else state.value,
            tier=self.tier(key),
            since_seconds=now - last.at if last else None,
            reason=self.failure(key),
            retry_in_seconds=max(0.0, record.retry_at - now) if record and record.failure else None,
            order=self._num_ahead(record) if record else 0,
            needed_bytes=None if needed is None else needed * unit,
            free_bytes=self._arena.num_free * unit,
            largest_free_bytes=self._arena.largest_free * unit,
            leased_bytes=self._leases.elements * unit,
            is_pinned=key in self._pins,
            transitions=[
                AdapterTransition(state, now - at, reason)
                for state, at, reason in histories.of(key)
            ],
        )

    def tier_stats(self) -> AdapterTierStats:
        unit = self._arena.element_bytes
        pinned = filter(None, map(self._records.get, self._pins))
        return AdapterTierStats(
            bytes_by_tier={
                Tier.DEVICE: (self._arena.capacity - self._arena.num_free) * unit,
                Tier.HOST: self._host.used_bytes,
            },
            num_leases=len(self._leases),
            leased_bytes=self._leases.elements * unit,
            pinned_bytes=sum(record.num_placed for record in pinned) * unit,
            free_bytes=self._arena.num_free * unit,
            largest_free_bytes=self._arena.largest_free * unit,
            awaited_bytes=self._num_awaited() * unit,
            loaded_bytes=self._loads.num_loaded_elements * unit,
            evictions=dict(self._loads.departures),
            num_leases_reaped=self._leases.num_reaped,
            num_moves=self._planner.num_moves,
            moved_bytes=self._planner.num_moved_elements * unit,
            load_seconds=self._records.load_times.snapshot(),
        )

    def _num_awaited(self) -> int:
        """Elements of the adapters that waiting requests need and that are not on the device."""
        missing = [key for key in self._next_uses if self._records.resident(key) is None]
        known = [size for key in missing if (size := self._num_elements(key))]
        num_unknown = len(missing) - len(known)
        return sum(known) + (num_unknown * self._mean_elements() if num_unknown else 0)

    def _num_elements(self, key: AdapterKey) -> int:
        """0 while no tier of the engine has the adapter."""
        record = self._records.get(key)
        known = record.num_elements if record is not None else None
        return known or self._host.size_of(key) // self._arena.element_bytes

    def _mean_elements(self) -> int:
        """Of the adapters that have a place on the device; 0 if none has."""
        placed = [record.num_placed for record in self._records if record.placement is not None]
        return sum(placed) // max(1, len(placed))

    def _num_ahead(self, record: Record[BlockT]) -> int:
        """The number of unfinished loads that began before this one; 0 if this one is finished."""
        ended = (State.RESIDENT, State.FAILED)
        if record.state in ended:
            return 0
        return sum(
            other.order < record.order and other.state not in ended for other in self._records
        )

    def _extent_use(
        self, record: Record[BlockT], extent: Extent, now: float, order: int | None
    ) -> ExtentUse:
        is_resident = record.state is State.RESIDENT
        is_idle = is_resident and not record.leases
        return ExtentUse(
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
