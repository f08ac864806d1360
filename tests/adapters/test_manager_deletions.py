"""A deletion waits for the last use, clears every tier and is answered once."""

from __future__ import annotations

import pytest

from loraplex.adapters.manager import Evicted, Tier
from support.blocks import make_key
from support.manager import ManagerWorld

A, B, C, D = (make_key(name) for name in "abcd")


def test_deleting_an_idle_adapter_clears_every_tier_and_then_says_so() -> None:
    world = ManagerWorld()
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
    assert world.manager.num_evictions == 0, "counts adapters evicted for another"


def test_deleting_an_adapter_that_is_nowhere_or_only_in_host_memory_is_answered() -> None:
    world = ManagerWorld(arena=4)
    world.use(A, 4)
    world.now += 1
    world.load(B, 4)
    world.manager.evict(A)
    world.manager.evict(C)
    world.settle()
    assert sorted(world.evicted()) == [A, C]
    assert set(world.host.blocks) == {B}


def test_deleting_a_leased_adapter_refuses_new_leases_and_waits_for_the_old_ones() -> None:
    world = ManagerWorld()
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
    assert world.arena.published.get(lease.row) == (A, lease.generation)
    assert world.evicted() == []
    manager.release("r")
    world.settle()
    assert world.evicted() == [A]
    assert not any(world.arena.cells)
    assert manager.failure(A) is None


def test_a_deletion_that_is_repeated_goes_on_and_says_what_there_was() -> None:
    world = ManagerWorld()
    world.load(A, 4)
    world.manager.evict(A)
    world.manager.evict(A)
    world.settle()
    assert world.manager.take_evicted() == [Evicted(A, device_bytes=8, host_bytes=8)]


@pytest.mark.parametrize("num_jobs_before", [0, 1])
@pytest.mark.parametrize("error", [None, RuntimeError("failed meanwhile")])
def test_deleting_during_a_read_or_copy_waits_for_its_end(
    num_jobs_before: int, error: Exception | None
) -> None:
    world = ManagerWorld()
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
    world = ManagerWorld(arena=4, host=4)
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
    world = ManagerWorld()
    world.manager.request(A)
    world.manager.evict(A)
    world.fetch(A, 4)
    world.manager.fetch_failed(A, "store_unavailable", "no answer")
    world.settle()
    assert world.manager.failure(A) is None
    assert world.host.used == world.arena.used == 0


def test_an_adapter_that_was_pushed_again_after_its_deletion_is_loaded_again() -> None:
    world = ManagerWorld()
    world.load(A, 4)
    world.manager.evict(A)
    world.load(A, 4)
    assert not world.host.holds(A), "not before the deletion has been answered"
    assert world.evicted() == [A]
    world.load(A, 4)
    assert world.manager.acquire(A, "r") is not None


def test_the_same_content_of_another_tenant_outlives_a_deletion() -> None:
    world = ManagerWorld()
    mine, theirs = make_key("same", "mine"), make_key("same", "theirs")
    world.load(mine, 4)
    world.load(theirs, 4)
    lease = world.manager.acquire(theirs, "r")
    assert lease is not None
    world.manager.evict(mine)
    assert world.arena.published.get(lease.row) == (theirs, lease.generation)
    assert world.host.holds(theirs)
