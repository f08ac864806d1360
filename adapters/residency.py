"""Where each adapter is, and how it gets to the device.

    STORED → FETCHING → READING → HOST → LOADING → RESIDENT,  or FAILED with a code and a back-off

One owner, the engine's loop, calls everything and never waits: reads and copies run in an
executor and are taken up by `poll`. A leased adapter stays where it is; the others make room when
one that waits needs it (see `room`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Generic, NamedTuple

from .errors import AdapterError, AdapterUnavailable, ArenaTooSmall
from .extents import Extent
from .identity import AdapterKey
from .reading import BlockT, Host, ReadQueue
from .record import Failure, Record, State, Tier
from .room import DeviceArena, Room

__all__ = ["AdapterStatus", "Failure", "Lease", "Residency", "Tier"]

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0
DELETED = Failure("adapter_deleted", "The adapter version was deleted.")

logger = logging.getLogger(__name__)


class Lease(NamedTuple):
    """A request's right to an adapter's place on the device, until it is released."""

    key: AdapterKey
    request_id: str
    row: int
    generation: int


class AdapterStatus(NamedTuple):
    """One adapter in a snapshot."""

    key: AdapterKey
    tier: Tier
    device_bytes: int
    num_leases: int


class Residency(Generic[BlockT]):
    """The state machine of all adapters of one engine.

    Counters: `num_loads` copies to the device, `num_evictions` adapters displaced for another.
    """

    def __init__(
        self,
        *,
        arena: DeviceArena[BlockT],
        host: Host[BlockT],
        executor: Executor,
        want: Callable[[AdapterKey], None],
        clock: Callable[[], float],
    ) -> None:
        """`want(key)` asks the fetcher; `fetched` or `fetch_failed` is its answer, in any order."""
        self._arena = arena
        self._host = host
        self._executor = executor
        self._want = want
        self._clock = clock
        self._room = Room(arena, clock)
        self._records: dict[AdapterKey, Record[BlockT]] = {}
        self._leases: dict[str, Lease] = {}  # by request
        self._leased: dict[str, int] = {}  # elements of the arena by tenant
        self._reads = ReadQueue(host, executor)
        self._copies: dict[AdapterKey, Future[None]] = {}
        self._retiring: list[AdapterKey] = []
        self._evicted: list[AdapterKey] = []
        self._num_requests = 0
        self.num_loads = 0
        self.num_evictions = 0

    @property
    def has_pending_work(self) -> bool:
        """Whether `poll` or `take_evicted` may yield something without any further call."""
        return bool(self._reads or self._copies or self._evicted or self._waiting())

    # --- requests -------------------------------------------------------------------------------

    def request(self, key: AdapterKey) -> None:
        """Begin to bring an adapter to the device, if it is not on its way and not backing off.

        Also tells that it is wanted still, so call it for as long as a request waits.
        """
        record = self._records.get(key)
        now = self._clock()
        if record is None:
            record = self._records[key] = Record(key)
        elif record.state is not State.FAILED or now < record.retry_at:
            record.last_used = now
            return
        self._begin(record, now)

    def acquire(self, key: AdapterKey, request_id: str) -> Lease | None:
        """Lease a resident adapter; None, and the same as `request`, if it cannot be leased now.

        A request holds at most one lease and gets the same one again.
        """
        held = self._leases.get(request_id)
        if held is not None:
            assert held.key == key, f"{request_id} holds a lease of another adapter"
            return held
        self.request(key)
        record = self._records[key]
        is_going = key in self._retiring or self._room.is_leaving(record)
        if record.state is not State.RESIDENT or is_going:
            return None
        assert record.placement is not None
        lease = Lease(key, request_id, record.placement.row, record.placement.generation)
        self._leases[request_id] = lease
        if not record.leases:
            self._count_leased(record, +1)
        record.leases.add(request_id)
        record.is_claimed = True
        return lease

    def release(self, request_id: str) -> None:
        """End a request's lease; without one, nothing happens.

        Call it after the last step that names the lease has finished: the extent may be
        overwritten at once.
        """
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return
        record = self._records[lease.key]
        record.leases.remove(request_id)
        if not record.leases:
            self._count_leased(record, -1)
        record.last_used = self._clock()
        self._finish_retirements()

    def failure(self, key: AdapterKey) -> Failure | None:
        """Why requests for this adapter must end, or None: wait, or ask `acquire`."""
        if key in self._retiring:
            return DELETED
        record = self._records.get(key)
        return record.failure if record is not None else None

    # --- the fetcher's answers --------------------------------------------------------------------

    def fetched(self, key: AdapterKey, path: Path | str, tier: Tier) -> None:
        """The adapter's verified block lies at `path`; `tier` is where the fetcher found it."""
        record = self._records.get(key)
        if record is None or record.state is not State.FETCHING:
            return  # deleted meanwhile, or an answer to an attempt that is over
        record.state, record.source = State.READING, tier
        self._reads.add(key, Path(path), order=record.order)

    def fetch_failed(self, key: AdapterKey, code: str, message: str) -> None:
        record = self._records.get(key)
        if record is not None and record.state is State.FETCHING:
            self._fail(record, Failure(code, message))

    # --- the owner's loop -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Take up finished reads and copies and begin the next; True if something changed."""
        changed = [
            self._take_up_reads(),
            self._take_up_copies(),
            self._finish_retirements(),
            self._place_waiting(),
        ]
        self._reads.start()
        return any(changed)

    def evict(self, key: AdapterKey) -> bool:
        """Delete an adapter here: no new lease from now on, gone once nothing uses it.

        `take_evicted` answers, once no tier holds it and its bytes are zero; True if that is
        already so.
        """
        self._records.setdefault(key, Record(key))
        if key not in self._retiring:
            self._retiring.append(key)
        self._finish_retirements()
        return key not in self._retiring

    def take_evicted(self) -> list[AdapterKey]:
        """Adapters whose deletion ended since the last call, each once."""
        evicted, self._evicted = self._evicted, []
        return evicted

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

    def leased_share(self, tenant_id: str) -> float:
        """The part of the arena under leases of this tenant's requests."""
        return self._leased.get(tenant_id, 0) / self._arena.capacity

    def snapshot(self) -> list[AdapterStatus]:
        """Every adapter that is in memory, requested or failed; most recently used first."""
        records = sorted(self._records.values(), key=_recency, reverse=True)
        keys = dict.fromkeys([*(record.key for record in records), *self._host.keys()])
        return [self._status(key) for key in keys]

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

    def _begin(self, record: Record[BlockT], now: float) -> None:
        self._num_requests += 1
        record.order = self._num_requests
        record.begun_at = record.last_used = now
        record.failure, record.was_fetched_again = None, False
        record.block = self._host.acquire(record.key)
        if record.block is None:
            self._fetch(record)
            return
        record.source = Tier.HOST
        self._await_room(record)

    def _fetch(self, record: Record[BlockT]) -> None:
        record.state, record.source = State.FETCHING, Tier.STORE
        self._want(record.key)

    def _await_room(self, record: Record[BlockT]) -> None:
        record.state, record.waiting_since = State.HOST, self._clock()
        assert record.block is not None
        if record.block.num_elements > self._arena.capacity:
            self._fail(record, _failure_of(ArenaTooSmall()))

    def _take_up_reads(self) -> bool:
        finished = self._reads.take_finished()
        for key, result in finished:
            record = self._records[key]
            if isinstance(result, FileNotFoundError) and not record.was_fetched_again:
                # The disk cache may have dropped the file before its turn came.
                record.was_fetched_again = True
                self._fetch(record)
            elif isinstance(result, Exception):
                self._fail(record, _failure_of(result), cause=result)
            else:
                record.block = result
                self._await_room(record)
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
        record.state = State.RESIDENT
        record.resident_since = record.last_used = self._clock()
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
        record.state, record.failure = State.FAILED, failure
        backoff = min(max(FIRST_BACKOFF_SECONDS, 2 * record.backoff_seconds), MAX_BACKOFF_SECONDS)
        record.backoff_seconds, record.retry_at = backoff, self._clock() + backoff
        self._forget_old_failures()

    def _forget_old_failures(self) -> None:
        """Keep no record of an adapter that nobody asked for since long after its back-off."""
        horizon = self._clock() - MAX_BACKOFF_SECONDS
        for key, record in list(self._records.items()):
            if record.state is State.FAILED and record.retry_at < horizon:
                del self._records[key]

    def _vacate(self, record: Record[BlockT]) -> None:
        self._room.vacate(record)
        self._release_block(record)

    def _release_block(self, record: Record[BlockT]) -> None:
        if record.block is not None:
            record.block = None
            self._host.release(record.key)
            self._reads.note_room()

    def _finish_retirements(self) -> bool:
        """Erase the deleted adapters that no lease, read or copy uses any more."""
        finished = [key for key in self._retiring if not self._is_used(self._records[key])]
        for key in finished:
            self._reads.discard(key)
            self._vacate(self._records.pop(key))
            self._host.remove(key)
            self._retiring.remove(key)
            self._evicted.append(key)
        return bool(finished)

    def _is_used(self, record: Record[BlockT]) -> bool:
        key = record.key
        return bool(record.leases) or self._reads.is_running(key) or key in self._copies

    def _count_leased(self, record: Record[BlockT], sign: int) -> None:
        assert record.placement is not None
        tenant_id = record.key.tenant_id
        leased = self._leased.get(tenant_id, 0) + sign * record.placement.extent.size
        if leased:
            self._leased[tenant_id] = leased
        else:
            del self._leased[tenant_id]

    def _waiting(self) -> list[Record[BlockT]]:
        return [record for record in self._records.values() if record.state is State.HOST]

    def _place_waiting(self) -> bool:
        """Begin the copies of those that fit, or can be made to fit."""
        waiting = self._waiting()
        for displaced in self._room.place_in_order(waiting):
            del self._records[displaced.key]
            self.num_evictions += 1
        num_copies = len(self._copies)
        for record in waiting:
            if record.placement is not None and record.block is not None:
                record.state = State.LOADING
                self._copies[record.key] = self._executor.submit(
                    self._arena.copy_into, record.placement, record.block
                )
        return len(self._copies) > num_copies


def _recency(record: Record[BlockT]) -> tuple[bool, float]:
    return bool(record.leases), record.last_used


def _failure_of(error: BaseException) -> Failure:
    """What the requests are told: our own errors as they are, of others nothing but that."""
    if isinstance(error, AdapterError):
        return Failure(error.code, str(error))
    return Failure(AdapterUnavailable.code, str(AdapterUnavailable()))
