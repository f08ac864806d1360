"""Room on the device: places blocks in the arena, moves and displaces idle adapters for them.

Bytes are zeroed by the loader threads before they are free again, so room that is made is not there
at once: whoever it is made for claims the window, and nobody else is placed in it. What lies in a
claimed window gets no new leases. Who may be displaced for whom is the eviction policy's decision.

Nobody starves: smaller adapters overtake one that does not fit for `PATIENCE_SECONDS` only. Then it
claims a window though leased adapters lie there; each goes when its last lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sized
from typing import Generic, NamedTuple

from .claims import Claims
from .compaction import plan_compaction
from .demand import Demand
from .erasures import Erasures
from .eviction import FREE, Cost, Occupant, Window, choose_window
from .eviction_policy import EvictionPolicy, Newcomer, Rank
from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, DeviceArena
from .moves import Moves
from .record import Departure, Record

PATIENCE_SECONDS = 4.0
MAX_REFUSALS = 16
"""Adapters for which room is looked for in vain in one round; the others wait for the next."""


class Eviction(NamedTuple, Generic[BlockT]):
    """An adapter that is on the device no more."""

    record: Record[BlockT]
    reason: Departure


class ArenaPlanner(Generic[BlockT]):
    """The arena's occupants and who waits for their place."""

    def __init__(
        self,
        arena: DeviceArena[BlockT],
        loaders: Loaders,
        clock: Callable[[], float],
        *,
        demand: Demand,
    ) -> None:
        self._arena = arena
        self._clock = clock
        self._demand = demand
        self._policy = EvictionPolicy(arena.capacity, demand, clock)
        self._claims = Claims()
        self._erasures = Erasures(arena, loaders)
        self._moves = Moves(arena, loaders, self._erasures)
        self._records: dict[AdapterKey, Record[BlockT]] = {}
        """Those that have a placement."""
        self.jobs: tuple[Sized, Sized] = self._moves.running, self._erasures.running
        """What `poll` takes up, as soon as it has ended."""

    @property
    def num_moves(self) -> int:
        return self._moves.num_moves

    @property
    def num_moved_elements(self) -> int:
        return self._moves.num_moved_elements

    @property
    def occupants(self) -> Collection[Record[BlockT]]:
        """The adapters that have a place in the arena."""
        return self._records.values()

    def poll(self) -> bool:
        """Take up finished moves and erasures; True if something changed."""
        has_moved = self._moves.poll()
        return self._erasures.poll() or has_moved

    def place_in_order(self, waiting: list[Record[BlockT]]) -> list[Eviction[BlockT]]:
        """Give a placement to each of `waiting` for which there is room, or begin to make room.

        Returns the adapters that were displaced: they are on the device no more.
        """
        evicted: list[Eviction[BlockT]] = []
        num_reachable = self._policy.num_reachable(self.occupants) if waiting else []
        refused: dict[tuple[str, bool, int], int] = {}
        for record in sorted(waiting, key=self._demand.rank):
            assert record.block is not None
            size, rights = record.block.num_elements, self._policy.rights(record)
            reach = self._demand.reach(record.key)
            most = min(num_reachable[reach], refused.get(rights, size + 1) - 1)
            if size > most and not self.has_claim(record.key):
                continue  # where a smaller one with the same rights found no room there is none
            evicted += self._place(record, record.block)
            if record.placement is None and not self.has_claim(record.key):
                refused[rights] = size
                if len(refused) == MAX_REFUSALS:
                    break
        evicted += self._claim_if_overdue([r for r in waiting if r.placement is None])
        return evicted

    def vacate(self, record: Record[BlockT]) -> None:
        """Take an adapter off the device, and off the list of those that wait for room.

        Its bytes are zeroed behind this; `is_erasing` tells whether they are not yet.
        """
        assert not record.leases, "a leased adapter stays where it is"
        assert not record.is_moving, "a move ends first"
        if record.placement is not None:
            self._erasures.begin(record.key, record.placement)
            record.placement = None
            del self._records[record.key]
        self._claims.drop(record.key)

    def is_leaving(self, record: Record[BlockT]) -> bool:
        """Whether the adapter lies in a claimed window or moves: nobody may lease it now."""
        if record.placement is None:
            return False
        return record.is_moving or self._claims.cover(record.placement.extent)

    def has_claim(self, key: AdapterKey) -> bool:
        """Whether room is being made for this adapter."""
        return key in self._claims

    def is_erasing(self, key: AdapterKey) -> bool:
        """Whether bytes of this adapter are in the arena that nothing refers to any more."""
        return self._erasures.is_erasing(key)

    def eviction_order(self) -> list[AdapterKey]:
        """Who would make room for another tenant's requests, first to last; who stays is not in it.

        What its tenant holds beyond its share goes before all others; see `byte_shares`.
        """
        return self._policy.order(self.occupants)

    # --- placing ----------------------------------------------------------------------------------

    def _place(self, record: Record[BlockT], block: BlockT) -> list[Eviction[BlockT]]:
        evicted = self._evict_leaving(record)
        if self._occupy(record, block) or self.has_claim(record.key):
            return evicted
        if not self._begin_compaction(record, block):
            evicted += self._evict_victims(record, block)
            self._occupy(record, block)
        return evicted

    def _occupy(self, record: Record[BlockT], block: BlockT) -> bool:
        record.placement = self._arena.place(
            record.key,
            block.num_elements,
            block.table,
            block.auxiliary,
            avoid=self._claims.of_others(record.key),
        )
        if record.placement is None:
            return False
        self._records[record.key] = record
        self._claims.drop(record.key)
        return True

    def _begin_compaction(self, record: Record[BlockT], block: BlockT) -> bool:
        """Move idle adapters together so that a run that is large enough comes free."""
        if self._arena.num_free < block.num_elements:
            return False
        avoid = self._claims.of_others(record.key)
        plan = plan_compaction(
            block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(_cost_to_move),
            avoid=avoid,
        )
        if plan is None:
            return False
        self._claims.add(record.key, plan.window)
        for key in plan.movers:
            self._moves.begin(self._records[key], [*avoid, plan.window])
        return True

    # --- displacing -------------------------------------------------------------------------------

    def _evict_victims(self, record: Record[BlockT], block: BlockT) -> list[Eviction[BlockT]]:
        newcomer = self._policy.newcomer(record, block.num_elements, self.occupants)
        window = self._choose_window(newcomer, block)
        if window is None:
            return []
        self._claims.add(record.key, window.extent)
        evicted: list[Eviction[BlockT]] = []
        for key in window.victims:
            reason = Departure.SHARE if key in newcomer.surplus.keys else Departure.ROOM
            evicted += self._evict([self._records[key]], reason)
        return evicted

    def _claim_if_overdue(self, waiting: list[Record[BlockT]]) -> list[Eviction[BlockT]]:
        """Claim a window for the most urgent of those that requests have missed for too long."""
        if self._claims.is_draining:
            return []
        overdue = [record for record in waiting if self._is_overdue(record)]
        first = min(overdue, key=self._demand.rank, default=None)
        if first is None or first.block is None:
            return []
        newcomer = self._policy.newcomer(
            first, first.block.num_elements, self.occupants, is_overdue=True
        )
        window = self._choose_window(newcomer, first.block)
        if window is None:
            return []  # other claims are in the way, and will be served first
        self._claims.drain(first.key, window.extent)
        return self._evict_leaving(first)

    def _is_overdue(self, record: Record[BlockT]) -> bool:
        is_missed = record.is_requested and not self.has_claim(record.key)
        return is_missed and self._demand.missed_since(record) <= self._clock() - PATIENCE_SECONDS

    def _evict_leaving(self, record: Record[BlockT]) -> list[Eviction[BlockT]]:
        """Displace who lies in the window that this record claims, and may go by now."""
        window = self._claims.get(record.key)
        if window is None:
            return []
        leaving = [
            occupant
            for occupant in self.occupants
            if occupant.is_idle
            and occupant.placement is not None
            and occupant.placement.extent.overlaps(window)
        ]
        is_drain = self._claims.is_drained_for(record.key)
        if not is_drain and any(occupant.key in self._demand.pins for occupant in leaving):
            self._claims.drop(record.key)  # it was to be moved, or was pinned meanwhile
            return []
        return self._evict(leaving, Departure.DRAINED if is_drain else Departure.ROOM)

    def _evict(self, records: list[Record[BlockT]], reason: Departure) -> list[Eviction[BlockT]]:
        for record in records:
            self.vacate(record)
        return [Eviction(record, reason) for record in records]

    def _choose_window(self, newcomer: Newcomer, block: BlockT) -> Window | None:
        return choose_window(
            block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(lambda occupant: self._policy.cost(occupant, newcomer)),
            avoid=self._claims.of_others(newcomer.record.key),
        )

    def _priced(self, cost: Callable[[Record[BlockT]], Cost | None]) -> list[Occupant]:
        """All that lies in the arena: adapters, what is on its way and what is zeroed."""
        adapters = [
            Occupant(record.placement.extent, record.key, cost(record))
            for record in self.occupants
            if record.placement is not None
        ]
        targets = [Occupant(extent, None, None) for extent in self._moves.targets()]
        vanishing = [Occupant(extent, None, FREE) for extent in self._erasures.extents()]
        return adapters + targets + vanishing


def _cost_to_move(record: Record[BlockT]) -> Cost | None:
    return Cost(Rank.ORDINARY, record.last_used) if record.is_idle else None
