"""The adapter manager under arbitrary orders of requests, failures, deletions and time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.adapters.errors import ObjectCorrupt
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Lease, Tier
from loraplex.adapters.record import MAX_BACKOFF_SECONDS
from loraplex.adapters.status import AdapterStatus
from support.blocks import make_key
from support.manager import ManagerWorld

ARENA, HOST = 12, 14
SIZES = {make_key(str(size), tenant): size for size in (2, 3, 5, 7, 12, 13) for tenant in "xy"}
"""Two tenants push the same contents; 13 fits into host memory but not into the arena."""
FITTING = [key for key, size in SIZES.items() if size <= ARENA]
keys = st.sampled_from(sorted(SIZES))


class ManagerMachine(RuleBasedStateMachine):
    """The model: who holds which lease, and whose deletion has not been answered."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ManagerWorld(arena=ARENA, host=HOST, num_soon=2)
        self.leases: dict[str, Lease] = {}
        self.deleting: set[AdapterKey] = set()
        self.known: dict[AdapterKey, AdapterStatus] = {}
        self.num_requests = 0

    @rule(key=keys)
    def request(self, key: AdapterKey) -> None:
        self.world.manager.request(key)

    @rule(key=keys, stay=st.sampled_from([0.0, 1.0, 100.0]))
    def prefetch(self, key: AdapterKey, stay: float) -> None:
        self.world.manager.prefetch(key, stay)

    @rule(pinned=st.lists(keys, max_size=3))
    def pin(self, pinned: list[AdapterKey]) -> None:
        self.world.manager.set_pinned(pinned)

    @rule(next_uses=st.lists(keys, unique=True))
    def expect(self, next_uses: list[AdapterKey]) -> None:
        self.world.manager.expect(next_uses)

    @rule(key=keys)
    def expect_last(self, key: AdapterKey) -> None:
        self.world.manager.expect_last(key)

    @rule()
    def reap(self) -> None:
        assert self.world.manager.reap(self.leases) == []

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A request goes without a release: the reaper finds its lease."""
        request_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[request_id]
        assert self.world.manager.reap(self.leases) == [request_id]

    @rule(key=keys)
    def acquire(self, key: AdapterKey) -> None:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        was_resident = self.world.manager.tier(key) is Tier.DEVICE
        has_failed = self.world.manager.failure(key) is not None
        assert self.world.manager.is_settled(key) == (was_resident or has_failed)
        lease = self.world.manager.acquire(key, request_id)
        if lease is None:
            return
        assert was_resident
        assert key not in self.deleting
        assert (lease.key, lease.request_id) == (key, request_id)
        self.leases[request_id] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_repeated=st.booleans())
    def release(self, data: st.DataObject, is_repeated: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[request_id]
        self.world.manager.release(request_id)
        if is_repeated:
            self.world.manager.release(request_id)
        self.take_evicted()

    @precondition(lambda self: self.world.wanted)
    @rule(data=st.data(), outcome=st.sampled_from(["good", "good", "corrupt", "gone", "failed"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.world.wanted))))
        match outcome:
            case "failed":
                self.world.wanted.remove(key)
                self.world.manager.fetch_failed(key, "store_unavailable", "no answer")
            case "corrupt":
                self.world.fetch(key, ObjectCorrupt())
            case "gone":
                self.world.fetch(key, FileNotFoundError())
            case _:
                self.world.fetch(key, SIZES[key], Tier.DISK)

    @precondition(lambda self: len(self.world.loaders) > 0)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def run_job(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.integers(0, len(self.world.loaders) - 1))
        self.world.loaders.run(index, error=RuntimeError("planted") if fails else None)

    @rule(count=st.integers(1, 3))
    def poll(self, count: int) -> None:
        for _ in range(count):
            self.world.manager.poll()
        self.take_evicted()

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 5.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(key=keys)
    def evict(self, key: AdapterKey) -> None:
        self.deleting.add(key)
        self.world.manager.evict(key)
        self.take_evicted()

    def take_evicted(self) -> None:
        for key in self.world.evicted():
            self.deleting.remove(key)  # each deletion is answered once
            assert key not in self.world.arena.cells
            assert not self.world.host.holds(key)

    @invariant()
    def leases_are_valid_while_they_are_held(self) -> None:
        for lease in self.leases.values():
            assert self.world.arena.published.get(lease.row) == (lease.key, lease.generation)

    @invariant()
    def extents_tile_the_arena_and_free_ones_hold_zeros(self) -> None:
        self.world.arena.extents.check()
        placed = {placement.extent for _, placement in self.world.arena.placements.values()}
        covered = {cell for extent in placed for cell in range(extent.offset, extent.end)}
        dirty = {index for index, cell in enumerate(self.world.arena.cells) if cell is not None}
        assert dirty <= covered
        assert self.world.arena.used == len(covered)

    @invariant()
    def the_books_agree(self) -> None:
        snapshot = {status.key: status for status in self.world.reports.snapshot()}
        held = [lease.key for lease in self.leases.values()]
        for key, status in snapshot.items():
            assert status.num_leases == held.count(key)
        room = self.world.manager._planner
        leaving = sum(extent.size for extent in room._erasures.extents())
        coming = sum(extent.size for extent in room._moves.targets())
        device_bytes = sum(status.device_bytes for status in snapshot.values())
        used = self.world.arena.used - leaving - coming
        assert device_bytes == used * self.world.arena.element_bytes
        assert self.world.host.used <= HOST

    @invariant()
    def changes_add_up_to_the_snapshot(self) -> None:
        changes = self.world.reports.take_changes()
        for key in changes.gone:
            self.known.pop(key, None)
        self.known.update({status.key: status for status in changes.statuses})
        assert self.known == {status.key: status for status in self.world.reports.snapshot()}

    @invariant()
    def no_poll_leaves_anything_behind(self) -> None:
        manager = self.world.manager
        if not any(manager._unfinished):
            assert not len(self.world.loaders)
            assert not manager._loads.has_work
            assert not manager._retirements.has_work or manager._retirements._evicted

    def teardown(self) -> None:
        """When faults end and leases are given back, everyone is served, and nothing is left."""
        self.release_all()
        self.world.settle()
        self.take_evicted()
        assert not self.deleting
        self.world.manager.set_pinned([])
        self.world.manager.expect([])
        self.world.now += MAX_BACKOFF_SECONDS
        self.everyone_who_fits_is_served()
        self.release_all()
        self.world.now += MAX_BACKOFF_SECONDS
        self.world.settle()
        assert self.world.arena.used == sum(
            status.device_bytes // 2 for status in self.world.reports.snapshot()
        )
        for key in SIZES:
            self.deleting.add(key)
            self.world.manager.evict(key)
        self.world.settle()
        self.take_evicted()
        assert not self.deleting
        assert self.world.reports.snapshot() == []
        assert self.world.arena.used == self.world.host.used == 0
        assert not self.world.host.in_use
        assert not self.world.manager.has_pending_work

    def everyone_who_fits_is_served(self) -> None:
        """All ask at once, and each holds its lease for up to three rounds."""
        waiting = set(FITTING)
        for round_number in range(200):
            for key in sorted(waiting):
                lease = self.world.manager.acquire(key, f"last {key}")
                if lease is not None:
                    waiting.remove(key)
                    self.leases[lease.request_id] = lease
            if not waiting:
                return
            self.world.manager.expect(sorted(waiting))
            for key in sorted(set(self.world.wanted)):
                self.world.fetch(key, SIZES[key])
            self.world.settle()
            self.world.now += 0.5
            if round_number % 3 == 0:
                self.release_all()
        raise AssertionError(f"{waiting} starve")

    def release_all(self) -> None:
        for request_id in self.leases:
            self.world.manager.release(request_id)
        self.leases.clear()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
