"""Places adapters in the arena, and moves and evicts idle adapters to make room.

The loader threads zero bytes before they are free again, so room is not available at once. An
adapter claims the window that is freed for it, and no other adapter is placed there. The adapters
in a claimed window get no new leases. The eviction policy decides which adapters may be evicted.

No adapter starves: smaller adapters overtake one that does not fit for at most `PATIENCE_SECONDS`.
Then it claims a window that may contain leased adapters; each is evicted when its last lease ends.
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
from .extents import Extent
from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, DeviceArena
from .moves import Moves
from .record import Departure, Record

PATIENCE_SECONDS = 4.0
MAX_REFUSALS = 16
"""The number of failed searches for room in one round; the other adapters wait for the next."""


class Eviction(NamedTuple, Generic[BlockT]):
    """An adapter that was removed from the device."""

    record: Record[BlockT]
    num_elements: int
    """Of the arena, which it held."""
    reason: Departure


class ArenaPlanner(Generic[BlockT]):
    """The adapters in the arena, and claims on their places."""

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
        """The adapters that have a placement."""
        self.jobs: tuple[Sized, ...] = (
            self._moves.running,
            self._erasures.running,
            self._claims.withheld,
        )
        """The jobs that `poll` completes once they have ended, and the end of the arena while it is
        cleared."""

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

    def resize(self, capacity: int) -> None:
        """Let the arena have this many elements: at once if these are more, else once
        `clear_withheld` has cleared its end. Ends an earlier change that is not complete."""
        self._claims.withheld.clear()
        if capacity < self._arena.capacity:
            self._claims.withhold(Extent(capacity, self._arena.capacity - capacity))
        else:
            self._set_capacity(capacity)

    @property
    def is_shrinking(self) -> bool:
        return bool(self._claims.withheld)

    def clear_withheld(self) -> list[Eviction[BlockT]]:
        """Move the idle adapters out of the end of the arena that is to be taken away, and take it
        away once it is empty.

        Returns those that were evicted: the ones that are evicted first, until the others fit.
        """
        if not self._claims.withheld:
            return []
        (window,) = self._claims.withheld
        evicted = self._evict_excess(window.offset)
        for record in self._inside(window):
            if not record.is_idle:
                continue
            self._moves.begin(record, self._claims.of_others(record.key))
            is_stuck = not (record.is_moving or self._moves.running or self._erasures.running)
            if is_stuck and self._policy.may_go(record):
                evicted += self._evict([record], Departure.KV)
        others = [*self._moves.targets(), *self._erasures.extents()]
        if not self._inside(window) and not any(map(window.overlaps, others)):
            self._claims.withheld.clear()
            self._set_capacity(window.offset)
        return evicted

    def place_in_order(self, waiting: list[Record[BlockT]]) -> list[Eviction[BlockT]]:
        """Place each of `waiting` for which there is room, or begin to make room.

        Returns the adapters that were evicted.
        """
        evicted: list[Eviction[BlockT]] = []
        num_reachable = self._policy.num_reachable(self.occupants) if waiting else []
        refused: dict[tuple[str, bool, int], int] = {}
        for record in sorted(waiting, key=self._demand.rank):
            assert record.block is not None
            size, rights = record.block.num_elements, self._policy.rights(record)
            distance = self._demand.eviction_distance(record.key)
            most = min(num_reachable[distance], refused.get(rights, size + 1) - 1)
            if size > most and not self.has_claim(record.key):
                continue  # a smaller one with the same rights found no room
            evicted += self._place(record, record.block)
            if record.placement is None and not self.has_claim(record.key):
                refused[rights] = size
                if len(refused) == MAX_REFUSALS:
                    break
        evicted += self._claim_if_overdue([r for r in waiting if r.placement is None])
        return evicted

    def vacate(self, record: Record[BlockT]) -> None:
        """Remove an adapter from the device, or its claim on room.

        Its bytes are zeroed afterwards; `is_erasing` is True until then.
        """
        assert not record.leases, "a leased adapter stays where it is"
        assert not record.is_moving, "a move ends first"
        if record.placement is not None:
            self._erasures.begin(record.key, record.placement)
            record.placement = None
            del self._records[record.key]
        self._claims.drop(record.key)

    def is_leaving(self, record: Record[BlockT]) -> bool:
        """Whether the adapter is in a claimed window or moves; then it cannot be leased."""
        if record.placement is None:
            return False
        return record.is_moving or self._claims.cover(record.placement.extent)

    def has_claim(self, key: AdapterKey) -> bool:
        """Whether room is being made for this adapter."""
        return key in self._claims

    def is_erasing(self, key: AdapterKey) -> bool:
        """Whether bytes of this adapter are still to be zeroed."""
        return self._erasures.is_erasing(key)

    def eviction_order(self) -> list[AdapterKey]:
        """The adapters that would be evicted for another tenant's requests, in this order.

        Adapters above their tenant's share come first; see `byte_shares`.
        """
        return self._policy.order(self.occupants)

    # --- the border -------------------------------------------------------------------------------

    def _evict_excess(self, capacity: int) -> list[Eviction[BlockT]]:
        """Evict in the order of eviction, until no more elements are held than these."""
        excess = sum(record.num_placed for record in self.occupants) - capacity
        evicted: list[Eviction[BlockT]] = []
        for key in self._policy.order(self.occupants) if excess > 0 else ():
            if excess <= 0:
                break
            excess -= self._records[key].num_placed
            evicted += self._evict([self._records[key]], Departure.KV)
        return evicted

    def _inside(self, window: Extent) -> list[Record[BlockT]]:
        """The adapters in a window, largest first."""
        inside = [
            record
            for record in self.occupants
            if record.placement is not None and record.placement.extent.overlaps(window)
        ]
        return sorted(inside, key=lambda record: record.num_placed, reverse=True)

    def _set_capacity(self, capacity: int) -> None:
        self._arena.resize(capacity)
        self._policy.capacity = self._arena.capacity
        self._demand.pins.resize(self._arena.capacity)

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
            vocab_size=block.vocab_size,
            avoid=self._claims.of_others(record.key),
        )
        if record.placement is None:
            return False
        self._records[record.key] = record
        self._claims.drop(record.key)
        return True

    def _begin_compaction(self, record: Record[BlockT], block: BlockT) -> bool:
        """Move idle adapters together to free a contiguous range of the needed size."""
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

    # --- evicting -------------------------------------------------------------------------------

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
        """Claim a window for the most urgent adapter that requests have waited for too long."""
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
            return []  # other claims come first
        self._claims.drain(first.key, window.extent)
        return self._evict_leaving(first)

    def _is_overdue(self, record: Record[BlockT]) -> bool:
        is_missed = record.is_requested and not self.has_claim(record.key)
        return is_missed and self._demand.missed_since(record) <= self._clock() - PATIENCE_SECONDS

    def _evict_leaving(self, record: Record[BlockT]) -> list[Eviction[BlockT]]:
        """Evict the adapters in the window that this record claims, if they are idle now."""
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
            self._claims.drop(record.key)  # an adapter there was pinned since
            return []
        return self._evict(leaving, Departure.DRAINED if is_drain else Departure.ROOM)

    def _evict(self, records: list[Record[BlockT]], reason: Departure) -> list[Eviction[BlockT]]:
        evicted = [Eviction(record, record.num_placed, reason) for record in records]
        for record in records:
            self.vacate(record)
        return evicted

    def _choose_window(self, newcomer: Newcomer, block: BlockT) -> Window | None:
        return choose_window(
            block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(lambda occupant: self._policy.cost(occupant, newcomer)),
            avoid=self._claims.of_others(newcomer.record.key),
        )

    def _priced(self, cost: Callable[[Record[BlockT]], Cost | None]) -> list[Occupant]:
        """Everything in the arena: adapters, targets of moves, and ranges that are being zeroed."""
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
