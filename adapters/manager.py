"""The adapter manager: decides which adapters are on the device.

    STORED → FETCHING → READING → HOST → LOADING → RESIDENT,  or FAILED with a code and a back-off

Only the engine's loop calls it, and no call waits: the loader threads read, copy, move and zero the
adapters' bytes, and `poll` completes their jobs. A leased adapter stays where it is; the others are
evicted when a waiting adapter needs the room.

Each part keeps one thing: `demand` the pins and next uses, `records` the states, `loads` the loads,
`arena_planner` the placements, `leases` the uses by requests, `retirements` the deletions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Sized
from concurrent.futures import Future
from pathlib import Path
from typing import Generic

from .arena_planner import ArenaPlanner
from .demand import Demand
from .fetches import Fetches
from .identity import AdapterKey
from .leases import Lease, Leases
from .loaders import Loaders
from .loads import Loads
from .memories import BlockT, DeviceArena, Host
from .record import Departure, Failure, Record, State
from .records import Records
from .reports import Reports
from .retirements import DELETING, Evicted, Retirements
from .tier import Tier

__all__ = ["AdapterManager", "Evicted", "Failure", "Lease", "Tier"]

PIN_INTERVAL_SECONDS = 0.25
"""How often to check for pinned adapters that are neither resident nor being loaded."""

logger = logging.getLogger(__name__)


class AdapterManager(Generic[BlockT]):
    """Brings the adapters of one engine to the device and leases them to requests.

    `fetches` holds what the fetcher is to be told, `reports` tells what is where. Counters:
    `num_loads` copies to the device, `num_evictions` adapters evicted for another.
    """

    def __init__(
        self,
        *,
        arena: DeviceArena[BlockT],
        host: Host[BlockT],
        loaders: Loaders,
        clock: Callable[[], float],
        num_soon: int,
    ) -> None:
        """`num_soon`: how many of the next uses count as soon, see `expect`."""
        self._arena = arena
        self._clock = clock
        self._host = host
        self._demand = Demand(arena.capacity, num_soon, clock)
        self._next_pin_time = 0.0
        self._records: Records[BlockT] = Records(clock)
        self.fetches = Fetches()
        self._leases = Leases()
        self._loaders = loaders
        self._retirements = Retirements(host, loaders)
        self._planner = ArenaPlanner(arena, loaders, clock, demand=self._demand)
        self._loads = Loads(
            arena=arena,
            host=host,
            loaders=loaders,
            records=self._records,
            planner=self._planner,
            demand=self._demand,
            deleting=self._retirements,
            fetches=self.fetches,
            clock=clock,
        )
        self._unfinished: tuple[Sized, ...] = (
            self._records.loading,
            *self._planner.jobs,
            self._retirements.open,
        )
        """All that `poll` has to get on with, as its owners keep it: loads, moves, erasures and
        deletions. Each is changed in place, never replaced."""
        self.reports = Reports(
            arena=arena,
            host=host,
            records=self._records,
            planner=self._planner,
            loads=self._loads,
            leases=self._leases,
            demand=self._demand,
            retirements=self._retirements,
            clock=clock,
        )

    @property
    def num_loads(self) -> int:
        return self._loads.num_loads

    @property
    def num_evictions(self) -> int:
        departures = self._loads.departures
        return sum(departures.values()) - departures[Departure.DELETED]

    @property
    def has_pending_work(self) -> bool:
        """Whether `poll`, `take_evicted` or `fetches` may yield something without a further call.

        Pins that wait for their next attempt are not counted: who polls now and then serves them.
        """
        has_jobs = self._loads.has_work or any(self._planner.jobs) or self._retirements.has_work
        return has_jobs or bool(self.fetches.read or self.fetches.wanted)

    # --- requests -------------------------------------------------------------------------------

    def request(self, key: AdapterKey) -> None:
        """Begin to load an adapter to the device, unless it is being loaded or backs off.

        Also tells that a request waits for it still, so call it as long as one does. While enough
        others are needed before it nothing begins, see `expect`.
        """
        record = self._ask(key, may_begin=self._demand.next_uses.may_begin(key))
        if record is not None:
            record.is_requested = True
            record.last_used = self._clock()

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        """The same though no request names it. It stays so long, unless a request needs the room.

        A stay begins now, or when the adapter arrives.
        """
        record = self._ask(key, may_begin=True)
        if record is not None:
            record.keep(stay_seconds, self._clock())

    def expect(self, keys: Iterable[AdapterKey]) -> None:
        """Set the adapters that waiting requests need, in the order of their next use.

        None of them is evicted for one that is needed later. Those that are needed soon are
        requested: they may have been evicted, or have failed, since their requests arrived.
        """
        self._demand.next_uses.set(keys)
        self._loads.reorder()
        for key in self._demand.next_uses.next():
            self.request(key)

    def expect_last(self, key: AdapterKey) -> None:
        """The same as `request`, for the adapter of a new request: it is needed last."""
        self._demand.next_uses.add(key)
        self.request(key)

    def set_pinned(self, keys: Sequence[AdapterKey]) -> None:
        """Keep these on the device, most wanted first, and let all others go; see `pins`."""
        pins = self._demand.pins
        pins.set(key for key in keys if key not in self._retirements)
        for record in self._records:
            if record.num_elements is not None:
                pins.note_size(record.key, record.num_elements)
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
        record = self._records.resident(key)
        if record is None or key in self._retirements or self._planner.is_leaving(record):
            return None
        self._demand.next_uses.remove(key)
        self._records.changed.add(key)
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
        record = self._leases.end(request_id)
        if record is not None:
            record.last_used = self._clock()
            self._records.changed.add(record.key)
            self._finish_retirements()

    def reap(self, live: Iterable[str]) -> list[str]:
        """Release the leases of all but these requests; return whose they were.

        There are none unless somebody forgot to release: each is counted and logged.
        """
        strays = self._leases.strays(live)
        for request_id in strays:
            logger.error("lease_reaped", extra={"request_id": request_id})
            self.release(request_id)
        self._leases.num_reaped += len(strays)
        return strays

    def failure(self, key: AdapterKey) -> Failure | None:
        """Why requests for this adapter must end, or None: wait, or ask `acquire`."""
        return self.reports.failure(key)

    # --- the fetcher's answers --------------------------------------------------------------------

    def fetched(self, key: AdapterKey, paths: Iterable[Path | str], tier: Tier) -> None:
        """The verified blocks of the adapter's parts lie at `paths`; `tier` is where the fetcher
        found them."""
        if key not in self._retirements:
            self._loads.fetched(key, tuple(map(Path, paths)), tier)

    def fetch_failed(self, key: AdapterKey, code: str, message: str) -> None:
        self._loads.fetch_failed(key, Failure(code, message))

    def forgive(self, key: AdapterKey) -> None:
        """Forget that a load has failed, and its back-off: what it failed for is mended."""
        self._loads.forgive(key)

    # --- the owner's loop -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Complete finished jobs and start the next; True if something changed."""
        if self._clock() >= self._next_pin_time:
            self._ask_for_pinned()
        if not any(self._unfinished):
            return False
        changed = [
            self._loads.take_up(),
            self._planner.poll(),
            self._finish_retirements(),
            self._loads.advance(),
        ]
        self._loads.start()
        return any(changed)

    def evict(self, key: AdapterKey) -> None:
        """Delete an adapter here: no new lease from now on, gone once nothing uses it.

        `take_evicted` answers, once no tier holds it and its bytes are zero.
        """
        record = self._records.get(key)
        num_placed = record.num_placed if record is not None else 0
        self._retirements.begin(key, num_placed * self._arena.element_bytes)
        self._demand.pins.remove(key)
        self._records.note(key, DELETING, Departure.DELETED)
        self._finish_retirements()

    def compositions_of(self, key: AdapterKey) -> set[AdapterKey]:
        """The compositions of an adapter of which this engine holds, or is loading, the block."""
        here = {record.key for record in self._records}.union(self._host.keys())
        return {each for each in here if each != key and each.has_part(key)}

    def take_evicted(self) -> list[Evicted]:
        """Adapters whose deletion ended since the last call, each once."""
        return self._retirements.take_evicted()

    # --- what is where ----------------------------------------------------------------------------

    def tier(self, key: AdapterKey) -> Tier:
        """The fastest tier of the engine that has the adapter; STORE if none has."""
        return self.reports.tier(key)

    def loaded_from(self, key: AdapterKey) -> Tier | None:
        """Where the load that made this adapter resident found it; None if it is not resident."""
        record = self._records.resident(key)
        return record.source if record is not None else None

    def load_seconds(self, key: AdapterKey) -> float:
        """How long the load took that made this adapter resident; 0 if it is not."""
        record = self._records.resident(key)
        return record.load_seconds if record is not None else 0.0

    def claim_load(self, key: AdapterKey) -> int:
        """The bytes that the load of this resident adapter copied to the device; 0 if it was
        claimed before. So each load is claimed once, by the first that uses it."""
        record = self._records.resident(key)
        if record is None:
            return 0
        num_bytes, record.num_unclaimed_bytes = record.num_unclaimed_bytes, 0
        return num_bytes

    def leased_share(self, tenant_id: str) -> float:
        """The part of the arena under leases of this tenant's requests."""
        return self._leases.elements_of(tenant_id) / self._arena.capacity

    # --- the border between adapters and the KV cache ---------------------------------------------

    def resize(self, num_bytes: int) -> None:
        """Let the arena have this many bytes; `is_shrinking` until the end of it is taken away.

        Idle adapters there are moved or evicted, and leased ones are waited for. Calling this again
        replaces what was wanted before.
        """
        self._planner.resize(num_bytes // self._arena.element_bytes)

    @property
    def is_shrinking(self) -> bool:
        return self._planner.is_shrinking

    @property
    def arena_bytes(self) -> int:
        return self._arena.capacity * self._arena.element_bytes

    @property
    def is_short_of_room(self) -> bool:
        """Whether adapters wait for room in the arena."""
        return bool(self._records.waiting())

    @property
    def awaited_room(self) -> int:
        """Bytes of the largest adapter that waits for room in the arena; 0: none does."""
        sizes = [record.num_elements or 0 for record in self._records.waiting()]
        return max(sizes, default=0) * self._arena.element_bytes

    def remember_evicted(self, num_bytes: int) -> None:
        """Count from now on what is lost because the arena has not so many bytes more."""
        self._loads.ghosts.depth = num_bytes // self._arena.element_bytes

    @property
    def reload_seconds(self) -> float:
        """The duration of the loads that so many bytes more would have spared; see
        `remember_evicted`."""
        return self._loads.reload_seconds

    # --- the border in host memory ----------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """The size of host memory for adapters now."""
        return self._host.capacity_bytes

    @property
    def awaited_host_bytes(self) -> int:
        """Bytes of the block that waits for room in host memory; 0: none does."""
        return self._loads.refused

    @property
    def reread_seconds(self) -> float:
        """What it took to bring blocks to host memory that as many bytes more would still have
        held; see `HostCache.remember_evicted`."""
        return self._loads.reread_seconds

    def resize_host(self, num_bytes: int) -> Future[bool]:
        """Let host memory for adapters have this many bytes; see `HostCache.resize`."""
        moved = abs(num_bytes - self._host.capacity_bytes)
        return self._loaders.submit(moved, self._host.resize, num_bytes)

    def note_host_room(self) -> None:
        """Host memory for adapters has become larger."""
        self._loads.look_again()

    def remember_evicted_on_host(self, num_bytes: int) -> None:
        """Count `reread_seconds` from now on."""
        self._host.remember_evicted(num_bytes)

    # --- within -----------------------------------------------------------------------------------

    def _ask(self, key: AdapterKey, *, may_begin: bool) -> Record[BlockT] | None:
        """The record of an adapter that is being loaded or backs off.

        None if it is deleted, or if it is not being loaded and may not begin.
        """
        if key in self._retirements:
            return None
        record = self._records.get(key)
        if record is None or record.may_begin_again(self._clock()):
            return self._loads.begin(key) if may_begin else None
        return record

    def _ask_for_pinned(self) -> None:
        """Pinned adapters come back by themselves, after failures with the ordinary back-off."""
        self._next_pin_time = self._clock() + PIN_INTERVAL_SECONDS
        for key in self._demand.pins:
            self._ask(key, may_begin=True)

    def _finish_retirements(self) -> bool:
        """Get on with the deletions that no lease, read, copy or move holds up any more."""
        for key in self._retirements.keys_on_device():
            if not self._is_used(key):
                self._loads.drop(key)
                self._retirements.leave_device(key)
        is_changed = self._retirements.finish(self._planner.is_erasing)
        if is_changed:
            self._loads.look_again()
        return is_changed

    def _is_used(self, key: AdapterKey) -> bool:
        record = self._records.get(key)
        is_held = record is not None and bool(record.leases or record.is_moving)
        return is_held or self._loads.is_busy(key)
