"""How adapters get to the device: fetched, read into host memory, placed, copied.

Each stage serves the most urgent first. Whatever touches an adapter's bytes is a job of the loader
threads; `take_up` takes up its end, `advance` and `start` begin the next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import Generic

from .arena_planner import PATIENCE_SECONDS, ArenaPlanner, Eviction
from .copying import CopyQueue
from .demand import Demand
from .errors import AdapterError, AdapterUnavailable, ArenaTooSmall
from .fetches import Fetches
from .ghosts import Ghosts
from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, DeviceArena, Host
from .reading import ReadQueue
from .record import MAX_BACKOFF_SECONDS, Departure, Failure, Record, State
from .records import Records
from .tier import Tier

FRUITLESS_REST = 10.0
"""A search for room that finds none is repeated after so many times as long as it took: with
hundreds of residents it takes milliseconds, and the loop has steps to run."""
MENDED = "mended"
"""The reason in the history of an adapter that was stored again after a load had failed."""
NO_ROOM = "no_room"
"""The reason in the history of an adapter that was only prefetched, and found no room."""

logger = logging.getLogger(__name__)


class Loads(Generic[BlockT]):
    """All loads of one engine, from `begin` to RESIDENT or FAILED.

    Counters: `num_loads` copies to the device and their `num_loaded_elements`, `departures` from it
    by their reasons.
    """

    def __init__(
        self,
        *,
        arena: DeviceArena[BlockT],
        host: Host[BlockT],
        loaders: Loaders,
        records: Records[BlockT],
        planner: ArenaPlanner[BlockT],
        demand: Demand,
        deleting: Container[AdapterKey],
        fetches: Fetches,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is placed on the device that is among `deleting`."""
        self._arena = arena
        self._host = host
        self._records = records
        self._planner = planner
        self._demand = demand
        self._deleting = deleting
        self._fetches = fetches
        self._clock = clock
        self._reads = ReadQueue(host, loaders, demand.rank)
        self._copies = CopyQueue(arena, loaders, demand.rank)
        self._place_after = -math.inf
        """When room is looked for again."""
        self.ghosts: Ghosts[AdapterKey] = Ghosts()
        """The adapters that were evicted last; sizes in elements."""
        self.reload_seconds = 0.0
        """Of the loads of `ghosts`."""
        self.reread_seconds = 0.0
        """Until the blocks were in host memory again that it had evicted last."""
        self.departures = dict.fromkeys(Departure, 0)
        self.num_loads = 0
        self.num_loaded_elements = 0

    @property
    def has_work(self) -> bool:
        """Whether a load proceeds without further calls."""
        return bool(self._reads or self._copies or self._records.waiting())

    def begin(self, key: AdapterKey) -> Record[BlockT]:
        """Load an adapter that has no record, or whose last load failed."""
        record = self._records.begin(key)
        record.is_reload = self.ghosts.take(key)
        record.block = self._host.acquire(key)
        record.is_read_again = record.block is None and self._host.take_ghost(key)
        if record.block is None:
            self._fetch(record)
        else:
            record.source = Tier.HOST
            self._await_room(record)
        return record

    def fetched(self, key: AdapterKey, paths: tuple[Path, ...], tier: Tier) -> None:
        """The fetcher's answer; one to an attempt that is over is ignored."""
        record = self._records.get(key)
        if record is not None and record.state is State.FETCHING:
            record.source, record.paths = tier, paths
            self._read(record)

    def fetch_failed(self, key: AdapterKey, failure: Failure) -> None:
        record = self._records.get(key)
        if record is not None and record.state is State.FETCHING:
            self._fail(record, failure)

    def forgive(self, key: AdapterKey) -> None:
        """Forget a failure and its back-off, and those of the adapter's compositions."""
        for record in self._records.made_of(key):
            if record.state is State.FAILED:
                self._records.forget(record.key, MENDED)

    def is_busy(self, key: AdapterKey) -> bool:
        """Whether a job reads or copies the adapter's bytes."""
        return self._reads.is_running(key) or self._copies.is_running(key)

    def drop(self, key: AdapterKey) -> None:
        """Forget an adapter that is deleted, however far it has come; nothing uses it."""
        self._reads.discard(key)
        self._copies.discard(key)
        record = self._records.get(key)
        if record is not None:
            self._records.forget(key)
            self.departures[Departure.DELETED] += record.placement is not None
            self._vacate(record)

    # --- the owner's loop -------------------------------------------------------------------------

    def take_up(self) -> bool:
        """Take up reads and copies that have ended; True if something changed."""
        has_read = self._take_up_reads()
        return self._take_up_copies() or has_read

    def advance(self) -> bool:
        """Place the waiting adapters, and make room; True if something changed."""
        for evicted in self._planner.clear_withheld():
            self._forget_evicted(evicted)
        has_placed = self._place_waiting()
        return self._give_way_in_host_memory() or has_placed

    def start(self) -> None:
        """Begin the most urgent copies and reads."""
        self._copies.start()
        self._reads.start()

    def reorder(self) -> None:
        """The demand has changed."""
        self._reads.reorder()

    @property
    def refused(self) -> int:
        """Bytes of the block that waits for room in host memory; 0: none does."""
        return self._host.refused_bytes if self._reads.blocked is not None else 0

    def look_again(self) -> None:
        """Host memory has come free."""
        self._reads.look_again()

    # --- stages -----------------------------------------------------------------------------------

    def _fetch(self, record: Record[BlockT]) -> None:
        record.source = Tier.STORE
        self._records.enter(record, State.FETCHING)
        self._fetches.want(record.key)

    def _read(self, record: Record[BlockT]) -> None:
        self._records.enter(record, State.READING)
        self._reads.add(record)

    def _await_room(self, record: Record[BlockT]) -> None:
        assert record.block is not None
        self._records.enter(record, State.HOST)
        if record.block.num_elements > self._arena.reserved:
            self._fail(record, _failure_of(ArenaTooSmall()))
        else:
            self._demand.pins.note_size(record.key, record.block.num_elements)

    def _copy(self, record: Record[BlockT]) -> None:
        self._records.enter(record, State.LOADING)
        self._copies.add(record)

    def _publish(self, record: Record[BlockT]) -> None:
        assert record.placement is not None
        self._arena.publish(record.placement)
        self._release_block(record)
        self._records.enter(record, State.RESIDENT)
        self.num_loads += 1
        self.num_loaded_elements += record.num_placed
        record.num_unclaimed_bytes = record.num_placed * self._arena.element_bytes
        if record.is_reload:
            self.reload_seconds += record.load_seconds

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
        self._demand.next_uses.remove(record.key)
        self._records.enter(record, State.FAILED, failure)
        self._forget_old_failures()

    def _forget_old_failures(self) -> None:
        """Drop the records of failed adapters that were not requested long after their back-off."""
        horizon = self._clock() - MAX_BACKOFF_SECONDS
        for record in list(self._records):
            if record.state is State.FAILED and record.retry_at < horizon:
                self._records.forget(record.key)

    def _vacate(self, record: Record[BlockT]) -> None:
        self._planner.vacate(record)
        self._release_block(record)

    def _release_block(self, record: Record[BlockT]) -> None:
        if record.block is not None:
            record.block = None
            self._host.release(record.key)
            self._reads.look_again()

    # --- jobs that have ended ---------------------------------------------------------------------

    def _take_up_reads(self) -> bool:
        finished = self._reads.take_finished()
        for record, result in finished:
            self._fetches.note_read(record.key)
            if isinstance(result, FileNotFoundError) and not record.was_fetched_again:
                # The disk cache may have dropped the file before its turn came.
                record.was_fetched_again = True
                self._fetch(record)
            elif isinstance(result, Exception):
                self._fail(record, _failure_of(result), cause=result)
            else:
                record.block = result
                if record.is_read_again:
                    self.reread_seconds += self._clock() - record.begun_at
                self._await_room(record)
        return bool(finished)

    def _take_up_copies(self) -> bool:
        finished = self._copies.take_finished()
        for record, error in finished:
            if error is None:
                self._publish(record)
            else:
                self._fail(record, _failure_of(error), cause=error)
        return bool(finished)

    # --- room -------------------------------------------------------------------------------------

    def _place_waiting(self) -> bool:
        """Begin the copies of those that fit, and make room for the others."""
        begun_at = self._clock()
        if begun_at < self._place_after:
            return False
        waiting = [record for record in self._records.waiting() if record.key not in self._deleting]
        for evicted in self._planner.place_in_order(waiting):
            self._forget_evicted(evicted)
        placed = [record for record in waiting if record.placement is not None]
        for record in placed:
            self._copy(record)
        self._give_up_wishes([record for record in waiting if record.placement is None])
        if not placed:
            ended_at = self._clock()
            self._place_after = ended_at + FRUITLESS_REST * (ended_at - begun_at)
        return bool(placed)

    def _forget_evicted(self, evicted: Eviction[BlockT]) -> None:
        key, reason = evicted.record.key, evicted.reason
        self.ghosts.add(key, evicted.num_elements)
        # A deletion does not need it, and is the last entry of its history.
        self._records.forget(key, None if key in self._deleting else reason)
        self.departures[reason] += 1

    def _give_up_wishes(self, waiting: list[Record[BlockT]]) -> None:
        """What no request waits for does not hold host memory for ever where there is no room.

        A pinned adapter will be asked for again.
        """
        horizon = self._clock() - PATIENCE_SECONDS
        for record in waiting:
            is_wanted = record.is_requested or self._planner.has_claim(record.key)
            if not is_wanted and record.entered_at <= horizon:
                self._vacate(record)
                self._records.forget(record.key, NO_ROOM)

    def _give_way_in_host_memory(self) -> bool:
        """Let the one that is needed last of those that wait for the device wait without its block,
        if one that is needed sooner finds no room for its own."""
        blocked = self._reads.blocked
        if blocked is None:
            return False
        holders = [
            record for record in self._records.waiting() if not self._planner.has_claim(record.key)
        ]
        if not holders:
            return False
        last = max(holders, key=self._demand.rank)
        distance = self._demand.next_uses.eviction_distance
        if distance(last.key) <= distance(blocked.key) or last.key in self._demand.pins:
            return False
        self._release_block(last)
        if last.paths:
            self._read(last)
        else:
            self._fetch(last)
        return True


def _failure_of(error: BaseException) -> Failure:
    """What the requests are told: our own errors as they are, of others nothing but that."""
    if isinstance(error, AdapterError):
        return Failure(error.code, str(error))
    return Failure(AdapterUnavailable.code, str(AdapterUnavailable()))
