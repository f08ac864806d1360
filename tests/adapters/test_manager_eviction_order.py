"""The eviction order of adapters without a next use, a pin or a tenant's share."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.adapters.arena_planner import PATIENCE_SECONDS
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.adapters.record import MAX_BACKOFF_SECONDS, MIN_STAY_SECONDS, UNCLAIMED_STAY_SECONDS
from support.blocks import make_key
from support.manager import ManagerWorld

A, B, C, D = (make_key(name) for name in "abcd")


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    world = ManagerWorld(arena=9)
    for key in (A, B, C):
        world.use(key, 3)
        world.now += 1
    world.manager.acquire(A, "r")
    world.manager.release("r")
    world.now += 1
    world.load(D, 3)
    assert world.resident() == {A, C, D}
    assert world.manager.num_evictions == 1


def test_an_adapter_that_was_asked_for_counts_as_used() -> None:
    world = ManagerWorld(arena=6)
    for key in (A, B):
        world.use(key, 3)
        world.now += 1
    world.manager.request(A)
    world.load(C, 3)
    assert world.resident() == {A, C}


def test_an_adapter_is_used_until_its_lease_ends() -> None:
    world = ManagerWorld(arena=6)
    world.load(A, 3)
    world.manager.acquire(A, "r")
    world.now += 1
    world.use(B, 3)
    world.now += 1
    world.manager.release("r")
    world.load(C, 3)
    assert world.resident() == {A, C}


def test_no_more_adapters_are_evicted_than_needed() -> None:
    world = ManagerWorld(arena=9)
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
    world = ManagerWorld(arena=4)
    world.load(A, 4)
    if is_claimed:
        world.manager.acquire(A, "r")
        world.manager.release("r")
    world.now += stay * 0.99
    world.load(B, 4)
    assert world.resident() == {A}
    world.now += stay * 0.02
    world.settle()
    assert world.resident() == {B}


def test_waiting_adapters_are_placed_in_the_order_of_their_requests() -> None:
    """A second attempt is a new request: D's first one failed."""
    world = ManagerWorld(arena=4)
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
        order += world.resident()
    assert order == [B, C, D]


def test_a_small_adapter_overtakes_a_large_one_that_does_not_fit() -> None:
    world = ManagerWorld(arena=10)
    world.load(A, 6)
    world.manager.acquire(A, "r")
    world.load(B, 8)
    world.load(C, 4)
    assert world.resident() == {A, C}


def test_a_large_adapter_is_not_starved_by_small_ones_that_are_always_in_use() -> None:
    world = ManagerWorld(arena=10)
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
    assert world.resident() == {D}
    assert world.now - started <= PATIENCE_SECONDS + 1.5


def test_evicted_adapters_come_back_when_the_large_one_was_served() -> None:
    world = ManagerWorld(arena=10)
    world.use(A, 5)
    world.now += 1
    world.use(D, 10)
    assert world.manager.acquire(A, "r") is None
    world.now += 1
    world.settle()
    assert world.manager.acquire(A, "r") is not None


def test_beside_a_reserved_window_others_come_and_go() -> None:
    world = ManagerWorld(arena=10)
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
    assert world.resident() >= {A, C}
    assert world.manager.acquire(C, "c") is not None
    world.manager.release("long")
    world.settle()
    assert world.manager.acquire(D, "large") is not None


def test_no_one_else_is_placed_in_a_reserved_window() -> None:
    world = ManagerWorld(arena=10)
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
    assert world.resident() == {D}


def test_an_adapter_that_makes_room_gets_no_new_lease() -> None:
    world = ManagerWorld(arena=4)
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
    assert world.resident() == {B}


def test_deleting_the_adapter_that_room_is_made_for_ends_the_reservation() -> None:
    world = ManagerWorld(arena=4)
    world.load(A, 4)
    world.manager.acquire(A, "r")
    world.load(B, 4)
    world.now += PATIENCE_SECONDS
    world.settle()
    world.manager.evict(B)
    assert world.manager.acquire(A, "s") is not None


def test_a_search_for_room_that_found_none_is_not_repeated_in_every_step() -> None:
    world = ManagerWorld(arena=10)
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
