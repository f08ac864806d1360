"""Adapters are loaded, stay while they are leased, and are evicted without a trace."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.adapters.arena_planner import PATIENCE_SECONDS
from loraplex.adapters.errors import ObjectCorrupt
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import (
    MAX_BACKOFF_SECONDS,
    AdapterStatus,
    Evicted,
    Failure,
    Tier,
)
from loraplex.adapters.record import MIN_STAY_SECONDS, UNCLAIMED_STAY_SECONDS
from support.blocks import make_key
from support.manager import ResidencyWorld

A, B, C, D = (make_key(name) for name in "abcd")


def resident(world: ResidencyWorld) -> set[AdapterKey]:
    return {status.key for status in world.manager.snapshot() if status.tier is Tier.DEVICE}


# --- the way to the device ------------------------------------------------------------------------


def test_a_cold_adapter_is_fetched_read_and_copied_and_then_leased() -> None:
    world = ResidencyWorld()
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
    assert world.arena.identity(lease.row) == (A, lease.generation)
    assert manager.num_loads == 1
    assert not manager.poll()


def test_asking_again_fetches_once() -> None:
    world = ResidencyWorld()
    for request_id in ("r", "s", "r"):
        world.manager.request(A)
        assert world.manager.acquire(A, request_id) is None
    assert world.wanted == [A]


def test_asking_for_a_lease_begins_the_load() -> None:
    world = ResidencyWorld()
    assert world.manager.acquire(A, "r") is None
    assert world.wanted == [A]


def test_an_adapter_in_host_memory_is_not_fetched_again() -> None:
    world = ResidencyWorld(arena=4)
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
    world = ResidencyWorld()
    world.manager.request(A)
    world.now += 3
    world.fetch(A, 4, Tier.DISK)
    world.now += 2
    world.settle()
    world.now += 7
    assert world.manager.loaded_from(A) is Tier.DISK
    assert world.manager.loaded_from(B) is None


def test_loads_of_different_adapters_run_side_by_side_and_end_in_any_order() -> None:
    world = ResidencyWorld()
    for key in (A, B):
        world.manager.request(key)
        world.fetch(key, 4)
    world.manager.poll()
    assert len(world.loaders) == 2
    world.loaders.run(1)
    world.manager.poll()
    world.loaders.run(1)
    world.manager.poll()
    assert resident(world) == {B}
    world.settle()
    assert resident(world) == {A, B}


def test_tells_whether_polling_may_yield_something() -> None:
    world = ResidencyWorld(arena=4)
    manager = world.manager
    assert not manager.has_pending_work
    manager.request(A)
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


def test_snapshot_names_every_adapter_with_its_tier_bytes_and_leases() -> None:
    world = ResidencyWorld(arena=4)
    world.use(A, 4)
    world.now += 1
    world.load(B, 3)
    world.manager.acquire(B, "r")
    world.manager.acquire(B, "s")
    world.manager.request(C)
    assert sorted(world.manager.snapshot()) == [
        AdapterStatus(A, Tier.HOST, 0, 0),
        AdapterStatus(B, Tier.DEVICE, 6, 2),
        AdapterStatus(C, Tier.STORE, 0, 0),
    ]


# --- leases ---------------------------------------------------------------------------------------


def test_a_request_gets_the_same_lease_again_and_releases_it_once() -> None:
    world = ResidencyWorld()
    manager = world.manager
    world.load(A, 4)
    lease = manager.acquire(A, "r")
    assert manager.acquire(A, "r") == lease
    assert manager.acquire(A, "s") != lease
    manager.release("r")
    manager.release("r")
    manager.release("unknown")
    assert [status.num_leases for status in manager.snapshot()] == [1]


def test_a_tenants_leased_share_counts_each_adapter_once_and_ends_with_its_last_lease() -> None:
    world = ResidencyWorld()
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
    world = ResidencyWorld()
    world.load(A, 4)
    world.load(B, 4)
    world.manager.acquire(A, "r")
    with pytest.raises(AssertionError, match="another adapter"):
        world.manager.acquire(B, "r")


def test_a_leased_adapter_is_never_displaced() -> None:
    world = ResidencyWorld(arena=4)
    world.load(A, 4)
    lease = world.manager.acquire(A, "r")
    assert lease is not None
    for _ in range(20):
        world.now += PATIENCE_SECONDS
        world.load(B, 4)
        assert world.arena.identity(lease.row) == (A, lease.generation)
    world.manager.release("r")
    world.settle()
    assert resident(world) == {B}


# --- making room ----------------------------------------------------------------------------------


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    world = ResidencyWorld(arena=9)
    for key in (A, B, C):
        world.use(key, 3)
        world.now += 1
    world.manager.acquire(A, "r")
    world.manager.release("r")
    world.now += 1
    world.load(D, 3)
    assert resident(world) == {A, C, D}
    assert world.manager.num_evictions == 1


def test_an_adapter_that_was_asked_for_counts_as_used() -> None:
    world = ResidencyWorld(arena=6)
    for key in (A, B):
        world.use(key, 3)
        world.now += 1
    world.manager.request(A)
    world.load(C, 3)
    assert resident(world) == {A, C}


def test_an_adapter_is_used_until_its_lease_ends() -> None:
    world = ResidencyWorld(arena=6)
    world.load(A, 3)
    world.manager.acquire(A, "r")
    world.now += 1
    world.use(B, 3)
    world.now += 1
    world.manager.release("r")
    world.load(C, 3)
    assert resident(world) == {A, C}


def test_no_more_adapters_are_displaced_than_needed() -> None:
    world = ResidencyWorld(arena=9)
    for key in (A, B):
        world.use(key, 3)
        world.now += 1
    world.load(C, 3)
    world.now += UNCLAIMED_STAY_SECONDS
    world.load(D, 2)
    assert world.manager.num_evictions == 1


@pytest.mark.parametrize(
    ("is_claimed", "stay"), [(True, MIN_STAY_SECONDS), (False, UNCLAIMED_STAY_SECONDS)]
)
def test_an_adapter_stays_a_while_after_it_came(is_claimed: bool, stay: float) -> None:
    world = ResidencyWorld(arena=4)
    world.load(A, 4)
    if is_claimed:
        world.manager.acquire(A, "r")
        world.manager.release("r")
    world.now += stay * 0.99
    world.load(B, 4)
    assert resident(world) == {A}
    world.now += stay * 0.02
    world.settle()
    assert resident(world) == {B}


def test_waiting_adapters_are_placed_in_the_order_of_their_requests() -> None:
    """A second attempt is a new request: D's first one failed."""
    world = ResidencyWorld(arena=4)
    world.load(A, 4)
    world.manager.acquire(A, "r")
    world.manager.request(D)
    world.manager.fetch_failed(D, "store_unavailable", "no answer")
    world.wanted.clear()
    world.now += MAX_BACKOFF_SECONDS
    for key in (B, C, D):
        world.manager.request(key)
    for key in (D, C, B):
        world.fetch(key, 4)
    world.settle()
    world.manager.release("r")
    order: list[AdapterKey] = []
    for _ in range(3):
        world.now += UNCLAIMED_STAY_SECONDS
        world.settle()
        order += resident(world)
    assert order == [B, C, D]


def test_a_small_adapter_overtakes_a_large_one_that_does_not_fit() -> None:
    world = ResidencyWorld(arena=10)
    world.load(A, 6)
    world.manager.acquire(A, "r")
    world.load(B, 8)
    world.load(C, 4)
    assert resident(world) == {A, C}


def test_a_large_adapter_is_not_starved_by_small_ones_that_are_always_in_use() -> None:
    world = ResidencyWorld(arena=10)
    for key in (A, B):
        world.load(key, 5)
        assert world.manager.acquire(key, f"{key.digest} 0")
    world.load(D, 10)
    started = world.now
    for turn in range(100):  # leases overlap: A and B are never idle by themselves
        for key in (A, B):
            world.manager.acquire(key, f"{key.digest} {turn + 1}")
            world.manager.release(f"{key.digest} {turn}")
        world.now += 0.5
        world.settle()
        if world.manager.acquire(D, "large"):
            break
    assert resident(world) == {D}
    assert world.now - started <= PATIENCE_SECONDS + 1.5


def test_displaced_adapters_come_back_when_the_large_one_was_served() -> None:
    world = ResidencyWorld(arena=10)
    world.use(A, 5)
    world.now += 1
    world.use(D, 10)
    assert world.manager.acquire(A, "r") is None
    world.now += 1
    world.settle()
    assert world.manager.acquire(A, "r") is not None


def test_beside_a_reserved_window_others_come_and_go() -> None:
    world = ResidencyWorld(arena=10)
    world.load(A, 6)
    world.manager.acquire(A, "long")
    world.load(B, 4)
    world.manager.acquire(B, "short")
    world.load(D, 6)  # A's place will be reserved for it
    world.now += PATIENCE_SECONDS
    world.settle()
    world.manager.release("short")
    world.now += 1
    world.load(C, 4)
    assert resident(world) >= {A, C}
    assert world.manager.acquire(C, "c") is not None
    world.manager.release("long")
    world.settle()
    assert world.manager.acquire(D, "large") is not None


def test_no_one_else_is_placed_in_a_reserved_window() -> None:
    world = ResidencyWorld(arena=10)
    for key in (A, B):
        world.load(key, 5)
        world.manager.acquire(key, key.digest)
    world.load(D, 10)
    world.now += PATIENCE_SECONDS
    world.settle()
    world.manager.release(B.digest)
    world.load(C, 5)
    assert world.manager.num_loads == 2
    world.manager.release(A.digest)
    world.settle()
    assert resident(world) == {D}


def test_an_adapter_that_makes_room_gets_no_new_lease() -> None:
    world = ResidencyWorld(arena=4)
    world.load(A, 4)
    lease = world.manager.acquire(A, "r")
    world.load(B, 4)
    world.now += PATIENCE_SECONDS / 2
    world.load(C, 4)
    world.now += PATIENCE_SECONDS / 2
    world.settle()
    assert world.manager.acquire(A, "s") is None
    assert world.manager.acquire(A, "r") == lease
    world.manager.release("r")
    world.settle()
    assert resident(world) == {B}


def test_deleting_the_adapter_that_room_is_made_for_ends_the_reservation() -> None:
    world = ResidencyWorld(arena=4)
    world.load(A, 4)
    world.manager.acquire(A, "r")
    world.load(B, 4)
    world.now += PATIENCE_SECONDS
    world.settle()
    world.manager.evict(B)
    assert world.manager.acquire(A, "s") is not None


# --- host memory ----------------------------------------------------------------------------------


def test_a_read_that_found_host_memory_full_is_not_overtaken() -> None:
    world = ResidencyWorld(arena=4, host=10)
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
    assert resident(world) == {small}


def test_host_memory_that_comes_free_during_a_refused_read_is_not_missed() -> None:
    world = ResidencyWorld(arena=4, host=4)
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


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_fetch_is_reported_and_tried_again_after_a_growing_back_off() -> None:
    world = ResidencyWorld()
    manager = world.manager
    failure = Failure("store_unavailable", "no answer")
    waits = []
    manager.request(A)
    for _ in range(9):
        assert manager.failure(A) is None
        world.wanted.clear()
        manager.fetch_failed(A, *failure)
        failed_at = world.now
        while A not in world.wanted:
            assert manager.failure(A) == failure
            assert manager.acquire(A, "r") is None
            world.now += 0.25
            manager.request(A)
        waits.append(world.now - failed_at)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_success_ends_the_back_off() -> None:
    world = ResidencyWorld()
    for _ in range(4):
        world.manager.request(A)
        world.manager.fetch_failed(A, "store_unavailable", "no answer")
        world.wanted.clear()
        world.now += MAX_BACKOFF_SECONDS
    world.load(A, 4)
    assert resident(world) == {A}
    assert world.manager.failure(A) is None


def test_a_failure_whose_cause_was_mended_is_tried_again_at_once() -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.manager.fetch_failed(A, "object_not_found", "gone")
    world.manager.request(A)
    assert world.manager.failure(A) is not None, "it backs off"
    world.manager.forgive(A)
    world.manager.forgive(B)
    assert world.manager.failure(A) is None
    world.load(A, 4)
    assert resident(world) == {A}
    world.manager.forgive(A)
    assert resident(world) == {A}, "what did not fail stays as it is"


def test_one_adapters_failure_leaves_the_others_alone() -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.manager.fetch_failed(A, "object_not_found", "gone")
    world.load(B, 4)
    assert resident(world) == {B}
    assert world.manager.failure(B) is None


def test_a_corrupt_file_fails_with_its_code() -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.fetch(A, ObjectCorrupt("not this adapter's block"))
    world.settle()
    assert world.manager.failure(A) == Failure("object_corrupt", "not this adapter's block")


def test_an_unforeseen_error_is_told_without_its_details() -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.fetch(A, OSError("/secret/path: input/output error"))
    world.settle()
    failure = world.manager.failure(A)
    assert failure is not None
    assert failure.code == "adapter_load_failed"
    assert "secret" not in failure.message


def test_a_failed_copy_gives_back_its_extent_and_its_use_of_host_memory() -> None:
    world = ResidencyWorld(arena=4)
    world.manager.request(A)
    world.fetch(A, 4)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    world.loaders.run(error=RuntimeError("device lost"))
    world.manager.poll()
    assert world.manager.failure(A) is not None
    world.settle()
    assert world.arena.used == 0
    assert not world.host.in_use
    world.load(B, 4)
    assert resident(world) == {B}


def test_a_file_that_vanished_before_it_was_read_is_fetched_again_once() -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.fetch(A, FileNotFoundError())
    world.settle()
    assert world.wanted == [A]
    assert world.manager.failure(A) is None
    world.fetch(A, FileNotFoundError())
    world.settle()
    assert world.wanted == []
    assert world.manager.failure(A) is not None


@pytest.mark.parametrize(("arena", "host"), [(4, 100), (100, 4)])
def test_an_adapter_larger_than_the_arena_or_host_memory_fails(arena: int, host: int) -> None:
    world = ResidencyWorld(arena=arena, host=host)
    world.load(A, 5)
    failure = world.manager.failure(A)
    assert failure is not None
    assert failure.code == "adapter_too_large"
    assert not world.host.in_use
    world.load(B, 4)
    assert resident(world) == {B}


def test_long_past_failures_are_forgotten() -> None:
    world = ResidencyWorld()
    for index in range(50):
        key = make_key(str(index))
        world.manager.request(key)
        world.manager.fetch_failed(key, "object_not_found", "gone")
        world.now += MAX_BACKOFF_SECONDS
    assert len(world.manager.snapshot()) <= 3


# --- deletion -------------------------------------------------------------------------------------


def test_deleting_an_idle_adapter_clears_every_tier_and_then_says_so() -> None:
    world = ResidencyWorld()
    world.load(A, 4)
    world.manager.evict(A)
    assert world.manager.acquire(A, "r") is None
    while len(world.loaders):
        assert world.evicted() == []
        world.loaders.run()
        world.manager.poll()
    assert world.manager.take_evicted() == [Evicted(A, device_bytes=8, host_bytes=8)]
    assert world.evicted() == []
    assert not any(world.arena.cells)
    assert world.arena.used == world.host.used == 0
    assert world.manager.tier(A) is Tier.STORE
    assert world.manager.num_evictions == 0, "counts adapters displaced for another"


def test_deleting_an_adapter_that_is_nowhere_or_only_in_host_memory_is_answered() -> None:
    world = ResidencyWorld(arena=4)
    world.use(A, 4)
    world.now += 1
    world.load(B, 4)
    world.manager.evict(A)
    world.manager.evict(C)
    world.settle()
    assert sorted(world.evicted()) == [A, C]
    assert set(world.host.blocks) == {B}


def test_deleting_a_leased_adapter_refuses_new_leases_and_waits_for_the_old_ones() -> None:
    world = ResidencyWorld()
    manager = world.manager
    world.load(A, 4)
    lease = manager.acquire(A, "r")
    assert lease is not None
    manager.evict(A)
    manager.evict(A)
    assert manager.acquire(A, "s") is None
    failure = manager.failure(A)
    assert failure is not None
    assert failure.code == "adapter_deleted"
    world.settle()
    assert world.arena.identity(lease.row) == (A, lease.generation)
    assert world.evicted() == []
    manager.release("r")
    world.settle()
    assert world.evicted() == [A]
    assert not any(world.arena.cells)
    assert manager.failure(A) is None


@pytest.mark.parametrize("num_jobs_before", [0, 1])
@pytest.mark.parametrize("error", [None, RuntimeError("failed meanwhile")])
def test_deleting_during_a_read_or_copy_waits_for_its_end(
    num_jobs_before: int, error: Exception | None
) -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.fetch(A, 4)
    world.manager.poll()
    for _ in range(num_jobs_before):
        world.loaders.run()
        world.manager.poll()
    world.manager.evict(A)
    world.manager.poll()
    assert world.evicted() == []
    world.loaders.run(error=error)
    world.settle()
    assert world.evicted() == [A]
    assert world.arena.used == world.host.used == 0
    assert not world.manager.has_pending_work


def test_deleting_during_a_read_that_is_refused_ends() -> None:
    world = ResidencyWorld(arena=4, host=4)
    world.load(A, 4)
    world.load(B, 4)
    world.manager.request(C)
    world.fetch(C, 4)
    world.manager.poll()
    world.manager.evict(C)
    world.loaders.run()  # host memory is full of B
    world.manager.poll()
    assert world.evicted() == [C]


def test_a_late_answer_of_the_fetcher_to_a_deleted_adapter_is_ignored() -> None:
    world = ResidencyWorld()
    world.manager.request(A)
    world.manager.evict(A)
    world.fetch(A, 4)
    world.manager.fetch_failed(A, "store_unavailable", "no answer")
    world.settle()
    assert world.manager.failure(A) is None
    assert world.host.used == world.arena.used == 0


def test_an_adapter_that_was_pushed_again_after_its_deletion_is_loaded_again() -> None:
    world = ResidencyWorld()
    world.load(A, 4)
    world.manager.evict(A)
    world.load(A, 4)
    assert not world.host.holds(A), "not before the deletion has been answered"
    assert world.evicted() == [A]
    world.load(A, 4)
    assert world.manager.acquire(A, "r") is not None


def test_the_same_content_of_another_tenant_outlives_a_deletion() -> None:
    world = ResidencyWorld()
    mine, theirs = make_key("same", "mine"), make_key("same", "theirs")
    world.load(mine, 4)
    world.load(theirs, 4)
    lease = world.manager.acquire(theirs, "r")
    assert lease is not None
    world.manager.evict(mine)
    assert world.arena.identity(lease.row) == (theirs, lease.generation)
    assert world.host.holds(theirs)


def test_a_search_for_room_that_found_none_is_not_repeated_in_every_step() -> None:
    world = ResidencyWorld(arena=10)
    holder, waiting = make_key("holder"), make_key("waiting")
    world.load(holder, 10)
    assert world.manager.acquire(holder, "long") is not None
    world.load(waiting, 10)
    num_searches = 0
    place = world.arena.place

    def slow_place(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_searches
        num_searches += 1
        world.now += 0.001
        return place(*args, **kwargs)

    world.arena.place = slow_place  # type: ignore[method-assign]
    world.manager.release("long")
    assert world.manager.acquire(holder, "longer") is not None

    for _ in range(100):
        world.manager.poll()
        world.now += 0.0005

    assert num_searches <= 6, "50 ms of steps, and eleven of them for each search of one"
    world.arena.place = place  # type: ignore[method-assign]
    world.manager.release("longer")
    world.now += 1.0
    world.settle()
    assert world.manager.tier(waiting) is Tier.DEVICE
