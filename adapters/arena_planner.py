"""Room on the device: places blocks in the arena, moves and displaces idle adapters for them.

Bytes are zeroed by the loader threads before they are free again, so room that is made is not there
at once: whoever it is made for claims the window, and nobody else is placed in it. What lies in a
claimed window gets no new leases. What waiting requests name makes room by their turns (`turns`).

Nobody starves: smaller adapters overtake one that does not fit for `PATIENCE_SECONDS` only. Then it
claims a window though leased adapters lie there; each goes when its last lease ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .block import PlacedExtra
from .byte_shares import Holding, Surplus, find_surplus
from .compaction import plan_compaction
from .eviction import FREE, Cost, Occupant, choose_window
from .extents import Extent, Placement
from .identity import AdapterKey
from .loaders import Loaders
from .next_use import NextUseRank, NextUses
from .reading import BlockT, BlockT_contra
from .record import Departure, Record

PATIENCE_SECONDS = 4.0
WORKING_SET_SECONDS = 10.0
"""An adapter within its tenant's share that was used so lately is not displaced for a tenant that
is beyond its own."""
ACTIVE_SECONDS = 60.0
"""A tenant that used none of its adapters for so long, and keeps none, has no share."""
MAX_REFUSALS = 16
"""Adapters for which room is looked for in vain in one round; the others wait for the next."""

NOBODY = AdapterKey("", "")
"""In the place of a newcomer, where it is only asked who would go."""

_SURPLUS, _ORDINARY, _KEPT, _EXPECTED, _PINNED = range(5)
"""Ranks of a displacement's cost, cheapest first."""


class DeviceArena(Protocol[BlockT_contra]):
    """Device memory; `arena.Arena` states the contract."""

    @property
    def capacity(self) -> int: ...

    @property
    def element_bytes(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def largest_free(self) -> int: ...

    def place(
        self,
        key: AdapterKey,
        num_elements: int,
        block_table: npt.NDArray[np.int64],
        auxiliary: Sequence[PlacedExtra] = (),
        *,
        avoid: Sequence[Extent] = (),
    ) -> Placement | None: ...

    def place_again(self, row: int, *, avoid: Sequence[Extent] = ()) -> Placement | None: ...

    def copy_into(self, placement: Placement, block: BlockT_contra) -> None: ...

    def copy_between(self, source: Placement, target: Placement) -> None: ...

    def publish(self, placement: Placement) -> None: ...

    def retire(self, placement: Placement) -> None: ...

    def erase(self, placement: Placement) -> None: ...

    def free(self, placement: Placement) -> None: ...


class Eviction(NamedTuple, Generic[BlockT]):
    """An adapter that is on the device no more."""

    record: Record[BlockT]
    reason: Departure


@dataclass
class _Erasure:
    """An extent that nothing refers to any more, until its bytes are zero."""

    key: AdapterKey
    placement: Placement
    job: Future[None]


@dataclass
class _Move(Generic[BlockT]):
    record: Record[BlockT]
    target: Placement
    job: Future[None]


class ArenaPlanner(Generic[BlockT]):
    """The arena's occupants and who waits for their place."""

    def __init__(
        self,
        arena: DeviceArena[BlockT],
        loaders: Loaders,
        clock: Callable[[], float],
        *,
        pins: Container[AdapterKey],
        turns: NextUses,
    ) -> None:
        self._arena = arena
        self._loaders = loaders
        self._clock = clock
        self._pins = pins
        self._turns = turns
        self._occupants: dict[AdapterKey, Record[BlockT]] = {}
        self._claims: dict[AdapterKey, Extent] = {}
        self._draining: AdapterKey | None = None
        """Whose claim waits for leases to end: one at a time."""
        self._erasures: list[_Erasure] = []
        self._moves: list[_Move[BlockT]] = []
        self.num_moves = 0
        self.num_moved = 0
        """Elements."""

    @property
    def has_work(self) -> bool:
        """Whether `poll` may change something without any further call."""
        return bool(self._erasures or self._moves)

    def poll(self) -> bool:
        """Take up finished moves and erasures; True if something changed."""
        return bool(self._take_up_moves()) | bool(self._take_up_erasures())

    def place_in_order(self, waiting: list[Record[BlockT]]) -> list[Eviction[BlockT]]:
        """Give a placement to each of `waiting` for which there is room, or begin to make room.

        Returns the adapters that were displaced: they are on the device no more.
        """
        evicted: list[Eviction[BlockT]] = []
        num_reachable = self._num_reachable() if waiting else []
        refused: dict[tuple[str, bool, int], int] = {}
        for record in sorted(waiting, key=self.next_use_rank):
            assert record.block is not None
            size, rights = record.block.num_elements, self._rights(record)
            most = min(num_reachable[self._reach(record)], refused.get(rights, size + 1) - 1)
            if size > most and record.key not in self._claims:
                continue  # where a smaller one with the same rights found no room there is none
            evicted += self._place(record, record.block)
            if record.placement is None and record.key not in self._claims:
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
            self._retire(record.key, record.placement)
            record.placement = None
            del self._occupants[record.key]
        self._drop_claim(record.key)

    def is_leaving(self, record: Record[BlockT]) -> bool:
        """Whether the adapter lies in a claimed window or moves: nobody may lease it now."""
        if record.placement is None:
            return False
        if record.is_moving:
            return True
        extent = record.placement.extent
        return any(extent.overlaps(window) for window in self._claims.values())

    def next_use_rank(self, record: Record[BlockT]) -> NextUseRank:
        """Pins first, then what is needed soon, by its turn; all others as they were asked for."""
        return self._reach(record), record.order

    def has_claim(self, key: AdapterKey) -> bool:
        """Whether room is being made for this adapter."""
        return key in self._claims

    def is_erasing(self, key: AdapterKey) -> bool:
        """Whether bytes of this adapter are in the arena that nothing refers to any more."""
        return any(erasure.key == key for erasure in self._erasures)

    def eviction_order(self) -> list[AdapterKey]:
        """Who would make room for another tenant's requests, first to last; who stays is not in it.

        What its tenant holds beyond its share goes before all others; see `byte_shares`.
        """
        now = self._clock()
        surplus = find_surplus(
            self._holdings(self._may_go),
            capacity=self._arena.capacity,
            active=self._active_tenants(),
            newcomer=NOBODY,
            newcomer_size=0,
        )

        going = [record for record in self._occupants.values() if self._may_go(record)]
        going.sort(key=lambda record: self._cost(record, surplus, now))
        return [record.key for record in going]

    # --- placing ----------------------------------------------------------------------------------

    def _place(self, record: Record[BlockT], block: BlockT) -> list[Eviction[BlockT]]:
        evicted = self._evict_leaving(record)
        if self._occupy(record, block) or record.key in self._claims:
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
            avoid=self._claims_of_others(record.key),
        )
        if record.placement is None:
            return False
        self._occupants[record.key] = record
        self._drop_claim(record.key)
        return True

    def _evict_leaving(self, record: Record[BlockT]) -> list[Eviction[BlockT]]:
        """Displace who lies in the window that this record claims, and may go by now."""
        window = self._claims.get(record.key)
        if window is None:
            return []
        is_drain = self._draining == record.key
        leaving = [
            occupant
            for occupant in self._occupants.values()
            if occupant.is_idle
            and occupant.placement is not None
            and occupant.placement.extent.overlaps(window)
        ]
        if not is_drain and any(occupant.key in self._pins for occupant in leaving):
            self._drop_claim(record.key)  # it was to be moved, or was pinned meanwhile
            return []
        return self._evict(leaving, Departure.DRAINED if is_drain else Departure.ROOM)

    def _evict_victims(self, record: Record[BlockT], block: BlockT) -> list[Eviction[BlockT]]:
        surplus = self._surplus(record, block, self._may_go)
        window = choose_window(
            block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(lambda occupant: self._cost_to_evict(occupant, record, surplus)),
            avoid=self._claims_of_others(record.key),
        )
        if window is None:
            return []
        self._claims[record.key] = window.extent
        victims = [self._occupants[key] for key in window.victims]
        return [
            evicted
            for victim in victims
            for evicted in self._evict(
                [victim], Departure.SHARE if victim.key in surplus.keys else Departure.ROOM
            )
        ]

    def _evict(self, records: list[Record[BlockT]], reason: Departure) -> list[Eviction[BlockT]]:
        for record in records:
            self.vacate(record)
        return [Eviction(record, reason) for record in records]

    def _claim_if_overdue(self, waiting: list[Record[BlockT]]) -> list[Eviction[BlockT]]:
        """Claim a window for the most urgent of those that requests have missed for too long."""
        if self._draining is not None:
            return []
        horizon = self._clock() - PATIENCE_SECONDS
        overdue = [
            record
            for record in waiting
            if record.is_requested
            and record.key not in self._claims
            and self._missed_since(record) <= horizon
        ]
        first = min(overdue, key=self.next_use_rank, default=None)
        if first is None or first.block is None:
            return []
        surplus = self._surplus(first, first.block, lambda occupant: not occupant.is_moving)
        window = choose_window(
            first.block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(lambda occupant: self._cost_to_drain(occupant, surplus)),
            avoid=self._claims_of_others(first.key),
        )
        if window is None:
            return []  # other claims are in the way, and will be served first
        self._claims[first.key] = window.extent
        self._draining = first.key
        return self._evict_leaving(first)

    def _drop_claim(self, key: AdapterKey) -> None:
        self._claims.pop(key, None)
        if self._draining == key:
            self._draining = None

    def _claims_of_others(self, key: AdapterKey) -> list[Extent]:
        return [window for claimant, window in self._claims.items() if claimant != key]

    # --- moving -----------------------------------------------------------------------------------

    def _begin_compaction(self, record: Record[BlockT], block: BlockT) -> bool:
        """Move idle adapters together so that a run that is large enough comes free."""
        if self._arena.num_free < block.num_elements:
            return False
        avoid = self._claims_of_others(record.key)
        plan = plan_compaction(
            block.num_elements,
            capacity=self._arena.capacity,
            occupants=self._priced(lambda r: Cost(_ORDINARY, r.last_used) if r.is_idle else None),
            avoid=avoid,
        )
        if plan is None:
            return False
        self._claims[record.key] = plan.window
        for key in plan.movers:
            self._begin_move(self._occupants[key], [*avoid, plan.window])
        return True

    def _begin_move(self, record: Record[BlockT], avoid: Sequence[Extent]) -> None:
        """Copy an idle adapter elsewhere; one for which there is no place will be displaced."""
        source = record.placement
        assert source is not None
        target = self._arena.place_again(source.row, avoid=avoid)
        if target is None:
            return
        record.is_moving = True
        job = self._loaders.submit(
            self._num_bytes(source), self._arena.copy_between, source, target
        )
        self._moves.append(_Move(record, target, job))

    def _take_up_moves(self) -> int:
        finished = [move for move in self._moves if move.job.done()]
        for move in finished:
            self._moves.remove(move)
            record, source = move.record, move.record.placement
            assert source is not None
            record.is_moving = False
            if move.job.exception() is None:
                self._arena.publish(move.target)
                record.placement = move.target
                self._retire(record.key, source)
                self.num_moves += 1
                self.num_moved += move.target.extent.size
            else:
                self._retire(record.key, move.target)
        return len(finished)

    # --- zeroing ----------------------------------------------------------------------------------

    def _retire(self, key: AdapterKey, placement: Placement) -> None:
        self._arena.retire(placement)
        self._erasures.append(_Erasure(key, placement, self._begin_erasing(placement)))

    def _begin_erasing(self, placement: Placement) -> Future[None]:
        return self._loaders.submit(self._num_bytes(placement), self._arena.erase, placement)

    def _take_up_erasures(self) -> int:
        finished = [erasure for erasure in self._erasures if erasure.job.done()]
        for erasure in finished:
            if erasure.job.exception() is None:
                self._erasures.remove(erasure)
                self._arena.free(erasure.placement)
            else:  # not zero, so not free
                erasure.job = self._begin_erasing(erasure.placement)
        return len(finished)

    def _num_bytes(self, placement: Placement) -> int:
        return placement.extent.size * self._arena.element_bytes

    # --- what it costs ----------------------------------------------------------------------------

    def _rights(self, record: Record[BlockT]) -> tuple[str, bool, int]:
        """Adapters that are alike in these may displace the same others."""
        return record.key.tenant_id, record.is_requested, self._reach(record)

    def _reach(self, record: Record[BlockT]) -> int:
        """Of a newcomer: occupants at a greater distance may be displaced for it."""
        return -1 if record.key in self._pins else self._turns.reach(record.key)

    def _num_reachable(self) -> list[int]:
        """How many elements are free or held by adapters that may be displaced now: nothing larger
        fits. By the newcomer's reach, from 0 on; at the end, index -1, for a reach of -1."""
        by_distance = [0] * (self._turns.num_soon + 2)
        now, num_held = self._clock(), 0
        for record in self._occupants.values():
            assert record.placement is not None
            size = record.placement.extent.size
            num_held += size
            if record.is_idle and now >= record.stays_until:
                by_distance[self._turns.distance(record.key)] += size
        num_free = self._arena.capacity - num_held
        beyond = [num_free + size for size in accumulate(reversed(by_distance))]
        return beyond[-2::-1] + beyond[-1:]

    def _priced(self, cost: Callable[[Record[BlockT]], Cost | None]) -> list[Occupant]:
        """All that lies in the arena: adapters, what is on its way and what is zeroed."""
        adapters = [
            Occupant(record.placement.extent, record.key, cost(record))
            for record in self._occupants.values()
            if record.placement is not None
        ]
        targets = [Occupant(move.target.extent, None, None) for move in self._moves]
        vanishing = [Occupant(erasure.placement.extent, None, FREE) for erasure in self._erasures]
        return adapters + targets + vanishing

    def _cost_to_evict(
        self, record: Record[BlockT], newcomer: Record[BlockT], surplus: Surplus
    ) -> Cost | None:
        """None for who may not go for this newcomer."""
        now = self._clock()
        if not self._may_go(record) or self._turns.distance(record.key) <= self._reach(newcomer):
            return None
        if now < record.kept_until and not newcomer.is_requested:
            return None
        is_in_work = now - record.last_used < WORKING_SET_SECONDS
        is_foreign = record.key.tenant_id != newcomer.key.tenant_id
        is_modest = newcomer.key in self._pins or not surplus.is_newcomer_beyond
        is_surplus = record.key in surplus.keys
        if is_foreign and is_in_work and not (is_modest or is_surplus):
            return None
        return self._cost(record, surplus, now)

    def _cost(self, record: Record[BlockT], surplus: Surplus, now: float) -> Cost:
        """What a tenant has too many first, then the least recently used; last what waiting
        requests name, and of that first whose turn is the last."""
        turn = self._turns.of(record.key)
        if turn is not None:
            return Cost(_EXPECTED, -turn)
        if record.key in surplus.keys:
            return Cost(_SURPLUS, record.last_used)
        return Cost(_KEPT if now < record.kept_until else _ORDINARY, record.last_used)

    def _cost_to_drain(self, record: Record[BlockT], surplus: Surplus) -> Cost | None:
        """All but what moves can be waited for; pinned adapters only if nothing else will do."""
        if record.is_moving:
            return None
        if record.key in self._pins:
            return Cost(_PINNED, record.last_used)
        rank = _SURPLUS if record.key in surplus.keys else _ORDINARY
        return Cost(rank, record.last_used)

    def _may_go(self, record: Record[BlockT]) -> bool:
        is_staying = self._clock() < record.stays_until
        return record.is_idle and not is_staying and record.key not in self._pins

    def _missed_since(self, record: Record[BlockT]) -> float:
        """While other adapters' turns come before, nobody misses this one."""
        if not self._turns:
            return record.entered_at
        soon_since = self._turns.soon_since(record.key)
        return math.inf if soon_since is None else max(record.entered_at, soon_since)

    def _surplus(
        self,
        newcomer: Record[BlockT],
        block: BlockT,
        may_go: Callable[[Record[BlockT]], bool],
    ) -> Surplus:
        return find_surplus(
            self._holdings(may_go),
            capacity=self._arena.capacity,
            active=self._active_tenants(),
            newcomer=newcomer.key,
            newcomer_size=block.num_elements,
        )

    def _active_tenants(self) -> frozenset[str]:
        now = self._clock()
        return frozenset(
            record.key.tenant_id
            for record in self._occupants.values()
            if record.leases or now - record.last_used < ACTIVE_SECONDS or now < record.kept_until
        )

    def _holdings(self, may_go: Callable[[Record[BlockT]], bool]) -> list[Holding]:
        return [
            Holding(record.key, record.placement.extent.size, record.last_used, may_go(record))
            for record in self._occupants.values()
            if record.placement is not None
        ]
