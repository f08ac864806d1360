"""Checks every eviction decision on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from loraplex.adapters.arena_planner import Eviction
from loraplex.adapters.eviction_policy import ACTIVE_SECONDS, WORKING_SET_SECONDS
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.record import Departure, Record
from support.manager import FakeBlock

from .violation import Invariant, require


class _Before(NamedTuple):
    """The device before somebody made room for itself."""

    held: dict[str, int]
    """Cells, by tenant."""
    active: set[str]
    last_used: dict[AdapterKey, float]
    kept: set[AdapterKey]
    """Whose prefetch asked for a stay that is not over."""


class EvictionChecks:
    """Listens to who makes room for whom."""

    def __init__(self, manager: AdapterManager[FakeBlock], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pins = manager._demand.pins
        self._planner = manager._planner
        self._evict = self._planner._evict
        self._evict_victims = self._planner._evict_victims
        vars(self._planner)["_evict"] = self._note_evicted
        vars(self._planner)["_evict_victims"] = self._note_victims

    def _note_evicted(
        self, records: list[Record[FakeBlock]], reason: Departure
    ) -> list[Eviction[FakeBlock]]:
        for record in records:
            require(
                record.key not in self._pins or reason is Departure.DRAINED,
                Invariant.PINS,
                f"{record.key} is evicted: {reason}",
            )
        return self._evict(records, reason)

    def _note_victims(
        self, newcomer: Record[FakeBlock], block: FakeBlock
    ) -> list[Eviction[FakeBlock]]:
        before = self._look(newcomer)
        evicted = self._evict_victims(newcomer, block)
        tenant_id, share = (
            newcomer.key.tenant_id,
            self._planner._arena.capacity / len(before.active),
        )
        is_beyond = before.held[tenant_id] + block.num_elements > share
        for victim, _, _ in evicted:
            require(
                newcomer.is_requested or victim.key not in before.kept,
                Invariant.PINS,
                f"{victim.key} was to be kept, and goes for {newcomer.key}",
            )
            if not is_beyond or newcomer.key in self._pins:
                continue
            owner = victim.key.tenant_id
            idle_seconds = self._clock() - before.last_used[victim.key]
            require(
                owner == tenant_id
                or before.held[owner] > int(share)
                or idle_seconds >= WORKING_SET_SECONDS,
                Invariant.SHARES,
                f"{victim.key}, used {idle_seconds:.3f} s ago, goes for {newcomer.key}",
            )
        return evicted

    def _look(self, newcomer: Record[FakeBlock]) -> _Before:
        now = self._clock()
        held: defaultdict[str, int] = defaultdict(int)
        active = {newcomer.key.tenant_id}
        occupants = self._planner.occupants
        for record in occupants:
            held[record.key.tenant_id] += record.num_placed
            is_kept = record.kept_until > now
            if record.leases or is_kept or now - record.last_used < ACTIVE_SECONDS:
                active.add(record.key.tenant_id)
        return _Before(
            held,
            active,
            {record.key: record.last_used for record in occupants},
            {record.key for record in occupants if record.kept_until > now},
        )
