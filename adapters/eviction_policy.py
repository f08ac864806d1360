"""Which adapters may be evicted for a newcomer, and in which order. Has no effects.

An occupant of the arena that may be evicted for a newcomer has a cost, its eviction key. `eviction`
chooses the window whose most expensive occupant is the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

from .byte_shares import Holding, Surplus, find_surplus
from .demand import Demand
from .eviction import Cost
from .identity import AdapterKey
from .record import Record

WORKING_SET_SECONDS = 10.0
"""An adapter within its tenant's share that was used within this time is not evicted for a tenant
above its share."""
ACTIVE_SECONDS = 60.0
"""A tenant that used none of its adapters for this time, and keeps none, has no share."""

NO_NEWCOMER = AdapterKey("", "")
"""Stands for the newcomer when only the order of eviction is asked for."""

Occupants = Collection[Record[Any]]


class Rank(IntEnum):
    """The first part of an eviction key: the smallest is evicted first."""

    SURPLUS = 0
    """Its tenant holds more than its byte share."""
    ORDINARY = 1
    KEPT = 2
    """A prefetch asked for a stay that is not over."""
    EXPECTED = 3
    """Waiting requests name it."""
    PINNED = 4


class Newcomer(NamedTuple):
    """An adapter for which others may be evicted."""

    record: Record[Any]
    surplus: Surplus
    """What the tenants would hold above their shares with it."""
    is_overdue: bool
    """Requests have waited for it too long: its window may wait for leases to end."""


class EvictionPolicy:
    """Judges the occupants of an arena by demand, byte shares and recency."""

    def __init__(self, capacity: int, demand: Demand, clock: Callable[[], float]) -> None:
        """`capacity` of the arena, in elements, which its owner may change."""
        self.capacity = capacity
        self._demand = demand
        self._clock = clock

    def newcomer(
        self, record: Record[Any], size: int, occupants: Occupants, *, is_overdue: bool = False
    ) -> Newcomer:
        may_go = _can_be_awaited if is_overdue else self.may_go
        surplus = self._surplus(occupants, record.key, size, may_go)
        return Newcomer(record, surplus, is_overdue)

    def cost(self, occupant: Record[Any], newcomer: Newcomer) -> Cost | None:
        """The eviction key of an occupant; None if it may not be evicted for this newcomer."""
        if not self._may_go_for(occupant, newcomer):
            return None
        return self.eviction_key(occupant, newcomer.surplus, is_overdue=newcomer.is_overdue)

    def eviction_key(
        self, occupant: Record[Any], surplus: Surplus, *, is_overdue: bool = False
    ) -> Cost:
        """The eviction key, `(rank, order within the rank)`: the smallest is evicted first.

        An adapter has the first of these ranks that applies:

        PINNED: by recency, the least recently used first. Only for an overdue newcomer.
        EXPECTED: by next use, the latest first.
        SURPLUS, KEPT, ORDINARY: by recency, the least recently used first.

        An overdue newcomer ignores next uses and requested stays.
        """
        if occupant.key in self._demand.pins:
            return Cost(Rank.PINNED, occupant.last_used)
        position = None if is_overdue else self._demand.next_uses.position(occupant.key)
        if position is not None:
            return Cost(Rank.EXPECTED, -position)
        if occupant.key in surplus.keys:
            return Cost(Rank.SURPLUS, occupant.last_used)
        is_kept = not is_overdue and self._clock() < occupant.kept_until
        return Cost(Rank.KEPT if is_kept else Rank.ORDINARY, occupant.last_used)

    def may_go(self, occupant: Record[Any]) -> bool:
        """Whether the adapter may be evicted for some newcomer that is not overdue."""
        is_staying = self._clock() < occupant.stays_until
        return occupant.is_idle and not is_staying and occupant.key not in self._demand.pins

    def order(self, occupants: Occupants) -> list[AdapterKey]:
        """The adapters that would be evicted for another tenant's requests, in this order."""
        surplus = self._surplus(occupants, NO_NEWCOMER, 0, self.may_go)
        going = [occupant for occupant in occupants if self.may_go(occupant)]
        going.sort(key=lambda occupant: self.eviction_key(occupant, surplus))
        return [occupant.key for occupant in going]

    def rights(self, newcomer: Record[Any]) -> tuple[str, bool, int]:
        """Newcomers with equal rights may evict the same adapters."""
        key = newcomer.key
        return key.tenant_id, newcomer.is_requested, self._demand.eviction_distance(key)

    def num_reachable(self, occupants: Occupants) -> list[int]:
        """The largest size that may fit: all elements that are free or held by evictable adapters.

        Indexed by the newcomer's eviction distance; -1 is last.
        """
        uses, now, num_held = self._demand.next_uses, self._clock(), 0
        by_distance = [0] * (uses.num_soon + 2)
        for occupant in occupants:
            num_held += occupant.num_placed
            if occupant.is_idle and now >= occupant.stays_until:
                by_distance[uses.distance(occupant.key)] += occupant.num_placed
        num_free = self.capacity - num_held
        beyond = [num_free + size for size in accumulate(reversed(by_distance))]
        return beyond[-2::-1] + beyond[-1:]

    def _may_go_for(self, occupant: Record[Any], newcomer: Newcomer) -> bool:
        if newcomer.is_overdue:
            return _can_be_awaited(occupant)
        limit = self._demand.eviction_distance(newcomer.record.key)
        if not self.may_go(occupant) or self._demand.next_uses.distance(occupant.key) <= limit:
            return False
        if self._clock() < occupant.kept_until and not newcomer.record.is_requested:
            return False
        return self._is_fair(occupant, newcomer)

    def _is_fair(self, occupant: Record[Any], newcomer: Newcomer) -> bool:
        """A tenant above its share may evict only the surplus and the unused adapters of others."""
        key, surplus = newcomer.record.key, newcomer.surplus
        if key in self._demand.pins or not surplus.is_newcomer_beyond:
            return True
        is_at_rest = self._clock() - occupant.last_used >= WORKING_SET_SECONDS
        is_own = occupant.key.tenant_id == key.tenant_id
        return is_own or is_at_rest or occupant.key in surplus.keys

    def _surplus(
        self,
        occupants: Occupants,
        newcomer: AdapterKey,
        size: int,
        may_go: Callable[[Record[Any]], bool],
    ) -> Surplus:
        return find_surplus(
            [
                Holding(occupant.key, occupant.num_placed, occupant.last_used, may_go(occupant))
                for occupant in occupants
            ],
            capacity=self.capacity,
            active=frozenset(
                occupant.key.tenant_id for occupant in occupants if self._is_active(occupant)
            ),
            newcomer=newcomer,
            newcomer_size=size,
        )

    def _is_active(self, occupant: Record[Any]) -> bool:
        now = self._clock()
        is_recent = now - occupant.last_used < ACTIVE_SECONDS
        return bool(occupant.leases) or is_recent or now < occupant.kept_until


def _can_be_awaited(occupant: Record[Any]) -> bool:
    """Whether waiting frees its place: leases end. A moving adapter frees its place anyway."""
    return not occupant.is_moving
