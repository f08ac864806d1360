"""Where each adapter is, and how it gets to the device.

    STORED → FETCHING → READING → HOST → LOADING → RESIDENT,  or FAILED with a code and a back-off

One owner, the engine's loop, calls everything and never waits: whatever touches an adapter's bytes
(reading, copying, moving, zeroing) is a job of the loader threads, and `poll` takes up its end. A
leased adapter stays where it is; the others make room when one that waits needs it (see `room` and
`turns`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, NamedTuple

from .arena_planner import PATIENCE_SECONDS, ArenaPlanner, DeviceArena, Eviction
from .errors import AdapterError, AdapterUnavailable, ArenaTooSmall
from .extents import Extent
from .histories import Histories, Transition
from .identity import AdapterKey
from .leases import Lease, Leases
from .load_times import Histogram, LoadTimes
from .loaders import Loaders
from .next_use import NextUseRank, NextUses
from .pins import Pins
from .reading import MAX_SUBMITTED, BlockT, Host, ReadQueue
from .record import Departure, Failure, Record, State, Tier
from .retirements import Evicted, Retirements

__all__ = ["AdapterManager", "AdapterStatus", "Evicted", "Explanation", "Failure", "Lease", "Tier"]

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0
PIN_INTERVAL_SECONDS = 0.25
"""How often pinned adapters are looked for that are not on their way."""
FRUITLESS_REST = 10.0
"""A search for room that finds none is repeated after so many times as long as it took: with
hundreds of residents it takes milliseconds, and the loop has steps to run."""
DELETED = Failure("adapter_deleted", "The adapter version was deleted.")
STORED = "stored"
DELETING = "deleting"
MENDED = "mended"
"""The reason in the history of an adapter that was stored anew after a load had failed."""
NO_ROOM = "no_room"
"""The reason in the history of an adapter that was only prefetched, and found no room."""

logger = logging.getLogger(__name__)


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
    """A State, STORED or DELETING."""
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


class AdapterManager(Generic[BlockT]):
    """The state machine of all adapters of one engine.

    Counters: `num_loads` copies to the device, `num_evictions` adapters displaced for another.
    """

    def __init__(
        self,
        *,
        arena: DeviceArena[BlockT],
        host: Host[BlockT],
        loaders: Loaders,
        want: Callable[[AdapterKey], None],
        has_read: Callable[[AdapterKey], None],
        clock: Callable[[], float],
        num_soon: int,
    ) -> None:
        """`want(key)` asks the fetcher; `fetched` or `fetch_failed` is its answer, in any order.
        `has_read(key)` tells it that what it fetched was read, or could not be.

        `num_soon`: of so many adapters the turn is soon, see `expect`.
        """
        self._arena = arena
        self._host = host
        self._loaders = loaders
        self._want = want
        self._has_read = has_read
        self._clock = clock
        self._pins = Pins(arena.capacity)
        self._next_pin_time = 0.0
        self._turns = NextUses(num_soon, clock)
        self._planner = ArenaPlanner(arena, loaders, clock, pins=self._pins, turns=self._turns)
        self._records: dict[AdapterKey, Record[BlockT]] = {}
        self._waiting: dict[AdapterKey, Record[BlockT]] = {}
        """Those in host memory, that wait for a place on the device."""
        self._leases = Leases()
        self._reads = ReadQueue(host, loaders, self._next_use_rank)
        self._place_after = -math.inf
        """When room is looked for again."""
        self._placed: dict[AdapterKey, Record[BlockT]] = {}
        """Those whose copies to the device have not begun."""
        self._copies: dict[AdapterKey, Future[None]] = {}
        self._retirements = Retirements(host, loaders)
        self._histories = Histories()
        self._load_times = LoadTimes()
        self._num_requests = 0
        self._departures = dict.fromkeys(Departure, 0)
        self.num_loads = 0
        self.num_leases_reaped = 0

    @property
    def num_evictions(self) -> int:
        return sum(self._departures.values()) - self._departures[Departure.DELETED]

    @property
    def has_pending_work(self) -> bool:
        """Whether `poll` or `take_evicted` may yield something without any further call.

        Pins that wait for their next attempt are not counted: who polls now and then serves them.
        """
        return bool(
            self._reads
            or self._placed
            or self._copies
            or self._planner.has_work
            or self._retirements.has_work
            or self._waiting
        )

    # --- requests -------------------------------------------------------------------------------

    def request(self, key: AdapterKey) -> None:
        """Begin to bring an adapter to the device, if it is not on its way and not backing off.

        Also tells that a request waits for it still, so call it as long as one does. While enough
        others are needed before it nothing begins, see `turns`.
        """
        record = self._ask(key, may_begin=self._turns.may_begin(key))
        if record is not None:
            record.is_requested = True
            record.last_used = self._clock()

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        """The same though no request names it. It stays so long, unless a request needs the room.

        A stay begins now, or when the adapter arrives.
        """
        record = self._ask(key, may_begin=True)
        if record is None:
            return
        if record.state is State.RESIDENT:
            record.last_used = now = self._clock()
            record.kept_until = max(record.kept_until, now + stay_seconds)
        else:
            record.stay_seconds = max(record.stay_seconds, stay_seconds)

    def expect(self, keys: Iterable[AdapterKey]) -> None:
        """Tell what waiting requests name, the next one first; it replaces what was told before.

        None of these is displaced for one that is needed later. Those whose turn is soon are
        requested: they may have been displaced, or have failed, since their requests came.
        """
        self._turns.set(keys)
        self._reads.reorder()
        for key in self._turns.next():
            self.request(key)

    def expect_last(self, key: AdapterKey) -> None:
        """The same as `request` for one that has just come: its turn is behind all others'."""
        self._turns.add(key)
        self.request(key)

    def set_pinned(self, keys: Sequence[AdapterKey]) -> None:
        """Keep these on the device, most wanted first, and let all others go; see `pins`."""
        self._pins.set(key for key in keys if key not in self._retirements)
        for record in self._records.values():
            self._note_size(record)
        self._next_pin_time = 0.0
        self._ask_for_pinned()

    def acquire(self, key: AdapterKey, request_id: str) -> Lease | None:
        """Lease a resident adapter; None, and the same as `request`, if it cannot be leased now.

        A request holds at most one lease and gets the same one again.
        """
        held = self._leases.get(request_id)
        if held is not None:
            assert held.key == key, f"{request_id} holds a lease of another adapter"
            return held
        self.request(key)
        record = self._records.get(key)
        if record is None or record.state is not State.RESIDENT:
            return None
        if key in self._retirements or self._planner.is_leaving(record):
            return None
        self._turns.remove(key)
        return self._leases.grant(record, request_id)

    def is_settled(self, key: AdapterKey) -> bool:
        """Whether it is resident, failed or deleted: of any other `acquire` grants no lease."""
        if key in self._retirements:
            return True
        record = self._records.get(key)
        return record is not None and record.state in (State.RESIDENT, State.FAILED)

    def release(self, request_id: str) -> None:
        """End a request's lease; without one, nothing happens.

        Call it after the last step that names the lease has finished: the extent may be
        overwritten at once.
        """
        lease = self._leases.pop(request_id)
        if lease is None:
            return
        record = self._records[lease.key]
        self._leases.end(record, request_id)
        record.last_used = self._clock()
        self._finish_retirements()

    def reap(self, live: Iterable[str]) -> list[str]:
        """Release the leases of all but these requests; return whose they were.

        There are none unless somebody forgot to release: each is counted and logged.
        """
        strays = self._leases.strays(live)
        for request_id in strays:
            logger.error("lease_reaped", extra={"request_id": request_id})
            self.release(request_id)
        self.num_leases_reaped += len(strays)
        return strays

    def failure(self, key: AdapterKey) -> Failure | None:
        """Why requests for this adapter must end, or None: wait, or ask `acquire`."""
        if key in self._retirements:
            return DELETED
        record = self._records.get(key)
        return record.failure if record is not None else None

    # --- the fetcher's answers --------------------------------------------------------------------

    def fetched(self, key: AdapterKey, path: Path | str, tier: Tier) -> None:
        """The adapter's verified block lies at `path`; `tier` is where the fetcher found it."""
        record = self._records.get(key)
        if record is None or record.state is not State.FETCHING or key in self._retirements:
            return  # deleted meanwhile, or an answer to an attempt that is over
        record.source = tier
        self._enter(record, State.READING)
        record.path = Path(path)
        self._reads.add(key, record.path)

    def fetch_failed(self, key: AdapterKey, code: str, message: str) -> None:
        record = self._records.get(key)
        if record is not None and record.state is State.FETCHING:
            self._fail(record, Failure(code, message))

    def forgive(self, key: AdapterKey) -> None:
        """Forget that a load has failed, and its back-off: what it failed for is mended."""
        record = self._records.get(key)
        if record is not None and record.state is State.FAILED:
            self._forget(key)
            self._histories.note(key, STORED, self._clock(), MENDED)

    # --- the owner's loop -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Take up finished jobs and begin the next; True if something changed."""
        changed = [
            self._take_up_reads(),
            self._take_up_copies(),
            self._planner.poll(),
            self._finish_retirements(),
            self._place_waiting(),
            self._give_way_in_host_memory(),
        ]
        self._ask_for_pinned()
        self._start_copies()
        self._reads.start()
        return any(changed)

    def evict(self, key: AdapterKey) -> None:
        """Delete an adapter here: no new lease from now on, gone once nothing uses it.

        `take_evicted` answers, once no tier holds it and its bytes are zero.
        """
        record = self._records.get(key)
        extent = record.placement.extent if record and record.placement else Extent(0, 0)
        self._retirements.begin(key, extent.size * self._arena.element_bytes)
        self._pins.remove(key)
        self._histories.note(key, DELETING, self._clock(), Departure.DELETED)
        self._finish_retirements()

    def take_evicted(self) -> list[Evicted]:
        """Adapters whose deletion ended since the last call, each once."""
        return self._retirements.take_evicted()

    # --- what is where ----------------------------------------------------------------------------

    def tier(self, key: AdapterKey) -> Tier:
        """The fastest tier of the engine that has the adapter; STORE if none has."""
        record = self._records.get(key)
        if record is not None and record.state is State.RESIDENT:
            return Tier.DEVICE
        if self._host.holds(key):
            return Tier.HOST
        return Tier.DISK if record is not None and record.state is State.READING else Tier.STORE

    def loaded_from(self, key: AdapterKey) -> Tier | None:
        """Where the load that made this adapter resident found it; None if it is not resident."""
        record = self._records.get(key)
        return record.source if record is not None and record.state is State.RESIDENT else None

    def load_seconds(self, key: AdapterKey) -> float:
        """How long the load took that made this adapter resident; 0 if it is not."""
        record = self._records.get(key)
        return record.load_seconds if record and record.state is State.RESIDENT else 0.0

    def leased_share(self, tenant_id: str) -> float:
        """The part of the arena under leases of this tenant's requests."""
        return self._leases.elements_of(tenant_id) / self._arena.capacity

    def snapshot(self) -> list[AdapterStatus]:
        """Every adapter that is in memory, requested or failed; most recently used first."""
        records = sorted(self._records.values(), key=_recency, reverse=True)
        keys = dict.fromkeys([*(record.key for record in records), *self._host.keys()])
        return [self._status(key) for key in keys]

    def extents(self) -> list[ExtentStatus]:
        """Every adapter that has a place in the arena, by offset."""
        order = {key: position for position, key in enumerate(self._planner.eviction_order())}
        now = self._clock()
        return sorted(
            (
                self._extent_status(record, record.placement.extent, now, order.get(record.key))
                for record in self._records.values()
                if record.placement is not None
            ),
            key=lambda status: status.offset_bytes,
        )

    def host_entries(self) -> list[HostStatus]:
        """Every adapter in host memory, least recently used first."""
        keys = self._host.keys()
        in_use = {record.key for record in self._records.values() if record.block is not None}
        return [
            HostStatus(key, self._host.size_of(key), key in self._pins, key in in_use)
            for key in keys
        ]

    def explain(self, key: AdapterKey) -> Explanation:
        """Why an adapter is where it is."""
        record, last = self._records.get(key), self._histories.last(key)
        unit = self._arena.element_bytes
        needed = self._num_elements(key)
        failure = self.failure(key)
        state = record.state.value if record is not None else STORED
        return Explanation(
            key=key,
            now=self._clock(),
            state=DELETING if key in self._retirements else state,
            tier=self.tier(key),
            since=last.at if last else None,
            failure=failure,
            retry_at=record.retry_at if record and record.failure else None,
            order=self._num_ahead(record) if record else 0,
            needed_bytes=None if needed is None else needed * unit,
            free_bytes=self._arena.num_free * unit,
            largest_free_bytes=self._arena.largest_free * unit,
            leased_bytes=self._leases.elements * unit,
            is_pinned=key in self._pins,
            transitions=self._histories.of(key),
        )

    def figures(self) -> Figures:
        unit = self._arena.element_bytes
        pinned = sum(
            record.placement.extent.size
            for record in self._records.values()
            if record.placement is not None and record.key in self._pins
        )
        return Figures(
            device_bytes=(self._arena.capacity - self._arena.num_free) * unit,
            host_bytes=self._host.used_bytes,
            num_leases=len(self._leases),
            leased_bytes=self._leases.elements * unit,
            pinned_bytes=pinned * unit,
            free_bytes=self._arena.num_free * unit,
            largest_free_bytes=self._arena.largest_free * unit,
            evictions=dict(self._departures),
            num_leases_reaped=self.num_leases_reaped,
            num_moves=self._planner.num_moves,
            moved_bytes=self._planner.num_moved * unit,
            load_seconds=self._load_times.snapshot(),
        )

    def _num_ahead(self, record: Record[BlockT]) -> int:
        """Loads that began earlier and are not over, if this one is not."""
        ended = (State.RESIDENT, State.FAILED)
        if record.state in ended:
            return 0
        return sum(
            other.order < record.order and other.state not in ended
            for other in self._records.values()
        )

    def _num_elements(self, key: AdapterKey) -> int | None:
        record = self._records.get(key)
        if record is not None and record.placement is not None:
            return record.placement.extent.size
        return record.block.num_elements if record is not None and record.block else None

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
        extent = record.placement.extent if record and record.placement else Extent(0, 0)
        return AdapterStatus(
            key,
            self.tier(key),
            extent.size * self._arena.element_bytes,
            len(record.leases) if record else 0,
        )

    # --- transitions ------------------------------------------------------------------------------

    def _ask(self, key: AdapterKey, *, may_begin: bool) -> Record[BlockT] | None:
        """The record of an adapter that is on its way, or backs off.

        None if it is deleted, or if it is not on its way and may not begin.
        """
        if key in self._retirements:
            return None
        record = self._records.get(key)
        now = self._clock()
        if record is not None and (record.state is not State.FAILED or now < record.retry_at):
            return record
        if not may_begin:
            return None
        if record is None:
            record = self._records[key] = Record(key)
        self._begin(record, now)
        return record

    def _ask_for_pinned(self) -> None:
        """Pinned adapters come back by themselves, after failures with the ordinary back-off."""
        now = self._clock()
        if now < self._next_pin_time:
            return
        self._next_pin_time = now + PIN_INTERVAL_SECONDS
        for key in self._pins:
            self._ask(key, may_begin=True)

    def _begin(self, record: Record[BlockT], now: float) -> None:
        self._num_requests += 1
        record.order = self._num_requests
        record.begun_at = record.last_used = now
        record.failure, record.was_fetched_again, record.is_requested = None, False, False
        record.path = None
        record.block = self._host.acquire(record.key)
        if record.block is None:
            self._fetch(record)
            return
        record.source = Tier.HOST
        self._await_room(record, is_step=False)

    def _enter(
        self, record: Record[BlockT], state: State, *, is_step: bool = True, why: str | None = None
    ) -> None:
        """`is_step`: the stage of the load that the adapter was in is complete."""
        now = self._clock()
        if is_step:
            self._load_times.add(record.state, now - record.entered_at)
        record.state, record.entered_at = state, now
        if state is State.HOST:
            self._waiting[record.key] = record
        else:
            self._waiting.pop(record.key, None)
        self._histories.note(record.key, state, now, why)

    def _forget(self, key: AdapterKey) -> None:
        del self._records[key]
        self._waiting.pop(key, None)

    def _fetch(self, record: Record[BlockT]) -> None:
        record.source = Tier.STORE
        self._enter(record, State.FETCHING, is_step=False)
        self._want(record.key)

    def _await_room(self, record: Record[BlockT], *, is_step: bool) -> None:
        assert record.block is not None
        self._enter(record, State.HOST, is_step=is_step)
        if record.block.num_elements > self._arena.capacity:
            self._fail(record, _failure_of(ArenaTooSmall()))
        else:
            self._note_size(record)

    def _note_size(self, record: Record[BlockT]) -> None:
        num_elements = self._num_elements(record.key)
        if num_elements is not None:
            self._pins.note_size(record.key, num_elements)

    def _take_up_reads(self) -> bool:
        finished = self._reads.take_finished()
        for key, result in finished:
            self._has_read(key)
            record = self._records[key]
            if isinstance(result, FileNotFoundError) and not record.was_fetched_again:
                # The disk cache may have dropped the file before its turn came.
                record.was_fetched_again = True
                self._fetch(record)
            elif isinstance(result, Exception):
                self._fail(record, _failure_of(result), cause=result)
            else:
                record.block = result
                self._await_room(record, is_step=True)
        return bool(finished)

    def _take_up_copies(self) -> bool:
        finished = [key for key, copy in self._copies.items() if copy.done()]
        for key in finished:
            error = self._copies.pop(key).exception()
            record = self._records[key]
            if error is None:
                self._publish(record)
            else:
                self._fail(record, _failure_of(error), cause=error)
        return bool(finished)

    def _publish(self, record: Record[BlockT]) -> None:
        assert record.placement is not None
        self._arena.publish(record.placement)
        self._release_block(record)
        self._enter(record, State.RESIDENT)
        record.resident_since = record.last_used = now = self._clock()
        record.load_seconds = now - record.begun_at
        record.kept_until = now + record.stay_seconds
        record.backoff_seconds = 0.0
        self.num_loads += 1

    def _fail(
        self, record: Record[BlockT], failure: Failure, cause: BaseException | None = None
    ) -> None:
        facts = {
            "tenant_id": record.key.tenant_id,
            "adapter_digest": record.key.digest,
            "code": failure.code,
        }
        logger.warning("adapter_load_failed", extra=facts, exc_info=cause)
        self._vacate(record)
        self._turns.remove(record.key)
        self._enter(record, State.FAILED, is_step=False, why=failure.code)
        record.failure, record.stay_seconds = failure, 0.0
        backoff = min(max(FIRST_BACKOFF_SECONDS, 2 * record.backoff_seconds), MAX_BACKOFF_SECONDS)
        record.backoff_seconds, record.retry_at = backoff, self._clock() + backoff
        self._forget_old_failures()

    def _forget_old_failures(self) -> None:
        """Keep no record of an adapter that nobody asked for since long after its back-off."""
        horizon = self._clock() - MAX_BACKOFF_SECONDS
        for key, record in list(self._records.items()):
            if record.state is State.FAILED and record.retry_at < horizon:
                self._forget(key)

    def _vacate(self, record: Record[BlockT]) -> None:
        self._planner.vacate(record)
        self._release_block(record)

    def _release_block(self, record: Record[BlockT]) -> None:
        if record.block is not None:
            record.block = None
            self._host.release(record.key)
            self._reads.look_again()

    def _finish_retirements(self) -> bool:
        """Get on with the deletions that no lease, read, copy or move holds up any more."""
        for key in self._retirements.keys_on_device():
            if self._is_used(key):
                continue
            self._reads.discard(key)
            self._placed.pop(key, None)
            record = self._records.get(key)
            if record is not None:
                self._forget(key)
                self._departures[Departure.DELETED] += record.placement is not None
                self._vacate(record)
            self._retirements.leave_device(key)
        is_changed = self._retirements.finish(self._planner.is_erasing)
        if is_changed:
            self._reads.look_again()
        return is_changed

    def _is_used(self, key: AdapterKey) -> bool:
        if self._reads.is_running(key) or key in self._copies:
            return True
        record = self._records.get(key)
        return record is not None and bool(record.leases or record.is_moving)

    def _place_waiting(self) -> bool:
        """Begin the copies of those that fit, and make room for the others."""
        begun_at = self._clock()
        if begun_at < self._place_after:
            return False
        waiting = [
            record for record in self._waiting.values() if record.key not in self._retirements
        ]
        for evicted in self._planner.place_in_order(waiting):
            self._forget_evicted(evicted)
        self._give_up_wishes(waiting)
        is_fruitful = False
        for record in waiting:
            if record.placement is not None and record.block is not None:
                self._enter(record, State.LOADING)
                self._placed[record.key] = record
                is_fruitful = True
        ended_at = self._clock()
        if not is_fruitful:
            self._place_after = ended_at + FRUITLESS_REST * (ended_at - begun_at)
        return is_fruitful

    def _start_copies(self) -> None:
        """Begin the most urgent ones, no more than run at once: the others may be overtaken."""
        room = MAX_SUBMITTED - len(self._copies)
        for key in sorted(self._placed, key=self._next_use_rank)[: max(room, 0)]:
            record = self._placed.pop(key)
            assert record.placement is not None
            assert record.block is not None
            self._copies[key] = self._loaders.submit(
                record.placement.extent.size * self._arena.element_bytes,
                self._arena.copy_into,
                record.placement,
                record.block,
            )

    def _next_use_rank(self, key: AdapterKey) -> NextUseRank:
        return self._planner.next_use_rank(self._records[key])

    def _give_way_in_host_memory(self) -> bool:
        """Let the one that is needed last of those that wait for the device wait without its block,
        if one that is needed sooner finds no room for its own."""
        blocked = self._reads.blocked
        if blocked is None:
            return False
        holders = [
            record for record in self._waiting.values() if not self._planner.has_claim(record.key)
        ]
        if not holders:
            return False
        last = max(holders, key=self._planner.next_use_rank)
        if self._turns.reach(last.key) <= self._turns.reach(blocked) or last.key in self._pins:
            return False
        self._release_block(last)
        if last.path is None:
            self._fetch(last)
        else:
            self._enter(last, State.READING, is_step=False)
            self._reads.add(last.key, last.path)
        return True

    def _give_up_wishes(self, waiting: list[Record[BlockT]]) -> None:
        """What no request waits for does not hold host memory for ever where there is no room.

        A pinned adapter will be asked for again.
        """
        horizon = self._clock() - PATIENCE_SECONDS
        for record in waiting:
            has_place = record.placement is not None or self._planner.has_claim(record.key)
            if not (has_place or record.is_requested) and record.entered_at <= horizon:
                self._vacate(record)
                self._histories.note(record.key, STORED, self._clock(), NO_ROOM)
                self._forget(record.key)

    def _forget_evicted(self, evicted: Eviction[BlockT]) -> None:
        key, reason = evicted.record.key, evicted.reason
        if key not in self._retirements:  # else its deletion goes on without it
            self._histories.note(key, STORED, self._clock(), reason)
        self._forget(key)
        self._departures[reason] += 1


def _recency(record: Record[BlockT]) -> tuple[bool, float]:
    return bool(record.leases), record.last_used


def _failure_of(error: BaseException) -> Failure:
    """What the requests are told: our own errors as they are, of others nothing but that."""
    if isinstance(error, AdapterError):
        return Failure(error.code, str(error))
    return Failure(AdapterUnavailable.code, str(AdapterUnavailable()))
