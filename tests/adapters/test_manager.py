"""Adapters are loaded, stay while they are leased, and are evicted without a trace."""

from __future__ import annotations

import pytest

from loraplex.adapters.arena_planner import PATIENCE_SECONDS
from loraplex.adapters.manager import Tier
from loraplex.adapters.record import UNCLAIMED_STAY_SECONDS
from loraplex.adapters.status import AdapterStatus
from support.blocks import make_key
from support.manager import ManagerWorld

A, B, C, D = (make_key(name) for name in "abcd")


# --- the way to the device ------------------------------------------------------------------------


def test_a_cold_adapter_is_fetched_read_and_copied_and_then_leased() -> None:
    world = ManagerWorld()
    manager = world.manager
    manager.request(A)
    assert (world.wanted, manager.tier(A)) == ([A], Tier.STORE)
    assert manager.acquire(A, "r") is None

    world.fetch(A, 4, Tier.DISK)
    assert manager.tier(A) is Tier.DISK
    manager.poll()
    world.loaders.run()
    assert manager.poll()
    assert manager.tier(A) is Tier.HOST
    assert manager.acquire(A, "r") is None

    world.loaders.run()
    assert manager.poll()
    assert manager.tier(A) is Tier.DEVICE
    lease = manager.acquire(A, "r")
    assert lease is not None
    assert (lease.key, lease.request_id) == (A, "r")
    assert world.arena.published.get(lease.row) == (A, lease.generation)
    assert manager.num_loads == 1
    assert not manager.poll()


def test_asking_again_fetches_once() -> None:
    world = ManagerWorld()
    for request_id in ("r", "s", "r"):
        world.manager.request(A)
        assert world.manager.acquire(A, request_id) is None
    assert world.wanted == [A]


def test_asking_for_a_lease_begins_the_load() -> None:
    world = ManagerWorld()
    assert world.manager.acquire(A, "r") is None
    assert world.wanted == [A]


def test_an_adapter_in_host_memory_is_not_fetched_again() -> None:
    world = ManagerWorld(arena=4)
    world.use(A, 4)
    world.now += 1
    world.use(B, 4)
    assert world.manager.tier(A) is Tier.HOST
    world.now += 1
    world.load(A, 4)
    assert world.manager.tier(A) is Tier.DEVICE
    assert world.manager.loaded_from(A) is Tier.HOST
    assert world.wanted == []


def test_a_resident_adapter_says_where_its_load_found_it() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.now += 3
    world.fetch(A, 4, Tier.DISK)
    world.now += 2
    world.settle()
    world.now += 7
    assert world.manager.loaded_from(A) is Tier.DISK
    assert world.manager.loaded_from(B) is None


def test_loads_of_different_adapters_run_side_by_side_and_end_in_any_order() -> None:
    world = ManagerWorld()
    for key in (A, B):
        world.manager.request(key)
        world.fetch(key, 4)
    world.manager.poll()
    assert len(world.loaders) == 2
    world.loaders.run(1)
    world.manager.poll()
    world.loaders.run(1)
    world.manager.poll()
    assert world.resident() == {B}
    world.settle()
    assert world.resident() == {A, B}


def test_tells_whether_polling_may_yield_something() -> None:
    world = ManagerWorld(arena=4)
    manager = world.manager
    assert not manager.has_pending_work
    manager.request(A)
    assert manager.has_pending_work, "the fetcher should hear of it"
    assert world.wanted == [A]
    assert not manager.has_pending_work  # the fetcher's answer will be a call
    world.fetch(A, 4)
    assert manager.has_pending_work
    world.settle()
    assert not manager.has_pending_work
    world.load(B, 4)  # waits for A's stay to end
    assert manager.has_pending_work
    world.now += UNCLAIMED_STAY_SECONDS
    world.settle()
    assert not manager.has_pending_work
    manager.evict(B)
    assert manager.has_pending_work
    world.settle()
    assert manager.has_pending_work, "somebody should hear of it"
    manager.take_evicted()
    assert not manager.has_pending_work


def test_each_poll_takes_up_what_has_ended_and_tells_it() -> None:
    world = ManagerWorld(arena=4)
    manager = world.manager
    assert not manager.poll()
    manager.request(A)
    assert not manager.poll()
    world.fetch(A, 4)
    assert not manager.poll(), "the read begins"
    for _ in ("the read", "the copy"):
        world.loaders.run()
        assert manager.poll()
    assert world.resident() == {A}
    assert not manager.poll()
    manager.evict(A)
    for _ in ("the arena's bytes", "those in host memory"):
        assert world.evicted() == []
        world.loaders.run()
        assert manager.poll()
    assert world.evicted() == [A]
    assert not manager.poll()


def test_room_of_a_failed_copy_is_taken_up_once_it_is_zeroed() -> None:
    world = ManagerWorld(arena=4)
    world.manager.request(A)
    world.fetch(A, 4)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    world.loaders.run(error=RuntimeError("planted"))
    assert world.manager.poll()
    assert world.arena.used == 4
    world.loaders.run()
    assert world.manager.poll()
    assert world.arena.used == 0


def test_snapshot_names_every_adapter_with_its_tier_bytes_and_leases() -> None:
    world = ManagerWorld(arena=4)
    world.use(A, 4)
    world.now += 1
    world.load(B, 3)
    world.manager.acquire(B, "r")
    world.manager.acquire(B, "s")
    world.manager.request(C)
    assert sorted(world.reports.snapshot(), key=lambda status: status.key) == [
        AdapterStatus(A, Tier.HOST, 0, 0),
        AdapterStatus(B, Tier.DEVICE, 6, 2),
        AdapterStatus(C, Tier.STORE, 0, 0),
    ]


# --- leases ---------------------------------------------------------------------------------------


def test_a_request_gets_the_same_lease_again_and_releases_it_once() -> None:
    world = ManagerWorld()
    manager = world.manager
    world.load(A, 4)
    lease = manager.acquire(A, "r")
    assert manager.acquire(A, "r") == lease
    assert manager.acquire(A, "s") != lease
    manager.release("r")
    manager.release("r")
    manager.release("unknown")
    assert [status.num_leases for status in manager.reports.snapshot()] == [1]


def test_a_tenants_leased_share_counts_each_adapter_once_and_ends_with_its_last_lease() -> None:
    world = ManagerWorld()
    manager = world.manager
    capacity = world.arena.capacity
    world.load(A, 4)
    world.load(B, 2)
    assert manager.leased_share(A.tenant_id) == 0.0
    for request_id in ("r", "s"):
        manager.acquire(A, request_id)
    manager.acquire(B, "t")
    assert manager.leased_share(A.tenant_id) == pytest.approx(6 / capacity)
    manager.release("r")
    assert manager.leased_share(A.tenant_id) == pytest.approx(6 / capacity)
    manager.release("s")
    assert manager.leased_share(A.tenant_id) == pytest.approx(2 / capacity)
    assert manager.leased_share("another") == 0.0


def test_a_request_cannot_lease_two_adapters() -> None:
    world = ManagerWorld()
    world.load(A, 4)
    world.load(B, 4)
    world.manager.acquire(A, "r")
    with pytest.raises(AssertionError, match="another adapter"):
        world.manager.acquire(B, "r")


def test_a_leased_adapter_is_never_evicted() -> None:
    world = ManagerWorld(arena=4)
    world.load(A, 4)
    lease = world.manager.acquire(A, "r")
    assert lease is not None
    for _ in range(20):
        world.now += PATIENCE_SECONDS
        world.load(B, 4)
        assert world.arena.published.get(lease.row) == (A, lease.generation)
    world.manager.release("r")
    world.settle()
    assert world.resident() == {B}


# --- host memory ----------------------------------------------------------------------------------


def test_a_read_that_found_host_memory_full_is_not_overtaken() -> None:
    world = ManagerWorld(arena=4, host=10)
    world.load(A, 4)
    world.manager.acquire(A, "r")
    world.load(B, 4)  # waits in host memory for A's place
    for key in (C, D):
        world.manager.request(key)
    world.fetch(C, 4)
    world.settle()
    assert set(world.host.blocks) == {B, C}
    large, small = make_key("large"), make_key("small")
    world.load(large, 4)
    world.load(small, 2)
    assert not world.host.holds(small), "it fits, but it came later"
    world.manager.release("r")
    for _ in range(5):
        world.now += UNCLAIMED_STAY_SECONDS
        world.settle()
    assert world.manager.num_loads == 5
    assert world.resident() == {small}


def test_host_memory_that_comes_free_during_a_refused_read_is_not_missed() -> None:
    world = ManagerWorld(arena=4, host=4)
    world.load(A, 4)
    world.manager.request(B)
    world.manager.request(C)
    world.fetch(B, 4)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()  # B is in host memory and waits for A's stay to end
    world.fetch(C, 4)
    world.manager.poll()
    world.loaders.run()  # refused, but that is not taken up yet
    world.manager.evict(B)
    world.settle()
    assert world.host.holds(C)
