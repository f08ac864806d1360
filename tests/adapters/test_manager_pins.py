"""Pinned adapters stay and are reloaded; prefetched adapters stay for the requested time."""

from __future__ import annotations

from itertools import pairwise

from loraplex.adapters.arena_planner import PATIENCE_SECONDS
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import PIN_INTERVAL_SECONDS, Tier
from loraplex.adapters.record import MAX_BACKOFF_SECONDS, UNCLAIMED_STAY_SECONDS, Departure
from support.blocks import make_key
from support.manager import ManagerWorld

A, B, C, D = (make_key(name) for name in "abcd")


def on_device(world: ManagerWorld, *keys: AdapterKey) -> bool:
    return all(world.manager.tier(key) is Tier.DEVICE for key in keys)


def answer_all(world: ManagerWorld, size: int) -> None:
    for key in list(world.wanted):
        world.fetch(key, size)
    world.settle()


def test_a_pinned_adapter_comes_to_the_device_without_a_request() -> None:
    world = ManagerWorld()
    world.manager.set_pinned([A])
    answer_all(world, 4)
    assert on_device(world, A)
    assert world.reports.explain(A).is_pinned


def test_a_pinned_adapter_makes_no_room_for_others() -> None:
    world = ManagerWorld(arena=10)
    world.manager.set_pinned([A])
    answer_all(world, 4)
    for index in range(10):
        world.now += 100
        world.use(make_key(str(index)), 6)
    assert on_device(world, A)
    assert world.reports.tier_stats().pinned_bytes == 8
    world.manager.set_pinned([])
    world.now += 100
    world.use(B, 10)
    assert not on_device(world, A)


def test_a_pin_comes_back_after_failures_with_the_ordinary_back_off() -> None:
    world = ManagerWorld()
    world.manager.set_pinned([A])
    attempts = []
    for _ in range(400):
        if A in world.wanted:
            attempts.append(world.now)
            world.wanted.remove(A)
            if len(attempts) < 5:
                world.manager.fetch_failed(A, "store_unavailable", "no answer")
            else:
                break
        world.now += PIN_INTERVAL_SECONDS
        world.manager.poll()
    waits = [after - before for before, after in pairwise(attempts)]
    assert waits == [0.5, 1.0, 2.0, 4.0]


def test_pins_hold_half_of_the_arena_at_most_in_the_order_of_preference() -> None:
    world = ManagerWorld(arena=10)
    world.manager.set_pinned([A, B, C])
    world.fetch(A, 3)
    world.fetch(B, 4)
    world.fetch(C, 2)
    world.settle()
    assert on_device(world, A, B, C), "there is room for all"
    assert [world.reports.explain(key).is_pinned for key in (A, B, C)] == [True, False, True]
    world.now += UNCLAIMED_STAY_SECONDS
    world.use(D, 4)
    assert on_device(world, A, C, D)
    assert not on_device(world, B)
    world.manager.set_pinned([B])
    assert not world.reports.explain(A).is_pinned


def test_a_pin_evicts_what_is_not_pinned() -> None:
    world = ManagerWorld(arena=10)
    world.use(A, 10)
    world.now += 1
    world.manager.set_pinned([B])
    answer_all(world, 4)
    assert on_device(world, B)


def test_an_adapter_that_fits_nowhere_else_evicts_pins_for_a_time() -> None:
    world = ManagerWorld(arena=10)
    world.manager.set_pinned([A])
    answer_all(world, 4)
    world.load(B, 10)
    world.now += PATIENCE_SECONDS
    world.settle()
    assert world.manager.acquire(B, "r") is not None
    assert world.reports.tier_stats().evictions[Departure.DRAINED] == 1
    world.now += MAX_BACKOFF_SECONDS
    world.manager.release("r")
    for _ in range(3):
        world.now += UNCLAIMED_STAY_SECONDS
        world.settle()
    assert on_device(world, A), "it came back from host memory"


def test_deleting_a_pinned_adapter_unpins_it() -> None:
    world = ManagerWorld()
    world.manager.set_pinned([A])
    answer_all(world, 4)
    world.manager.evict(A)
    world.settle()
    assert world.evicted() == [A]
    world.now += MAX_BACKOFF_SECONDS
    world.settle()
    assert world.wanted == []
    assert not world.reports.explain(A).is_pinned


def test_a_stay_outlasts_prefetches_and_pins_but_no_request() -> None:
    world = ManagerWorld(arena=10)
    manager = world.manager
    manager.prefetch(A, stay_seconds=100.0)
    answer_all(world, 6)
    world.now += 50
    manager.prefetch(B)
    answer_all(world, 6)
    assert on_device(world, A)
    manager.request(B)
    world.settle()
    assert on_device(world, B)
    assert not on_device(world, A)


def test_a_stay_ends() -> None:
    world = ManagerWorld(arena=10)
    world.manager.prefetch(A, stay_seconds=100.0)
    answer_all(world, 6)
    world.now += 101
    world.manager.prefetch(B)
    answer_all(world, 6)
    assert on_device(world, B)


def test_a_prefetch_that_finds_no_room_is_given_up_and_a_pin_asked_for_again() -> None:
    world = ManagerWorld(arena=10)
    world.load(A, 10)
    assert world.manager.acquire(A, "r") is not None
    world.manager.prefetch(B)
    world.manager.set_pinned([C])
    answer_all(world, 4)
    assert world.host.in_use == {B, C}
    world.now += PATIENCE_SECONDS
    world.manager.poll()
    assert world.host.in_use <= {C}
    assert world.reports.explain(B).transitions[-1].reason == "no_room"
    world.manager.release("r")
    world.now += PIN_INTERVAL_SECONDS
    world.settle()
    assert on_device(world, C)
    assert world.manager.tier(B) is Tier.HOST


def test_the_stay_of_a_resident_adapter_is_prolonged() -> None:
    world = ManagerWorld(arena=10)
    world.use(A, 6)
    world.manager.prefetch(A, stay_seconds=100.0)
    world.now += 99
    world.manager.prefetch(B)
    answer_all(world, 6)
    assert on_device(world, A)


def test_kept_adapters_are_the_last_of_their_tenant_to_make_room() -> None:
    world = ManagerWorld(arena=10)
    world.manager.prefetch(A, stay_seconds=1000.0)
    answer_all(world, 5)
    world.now += 500
    world.use(make_key("new", "other"), 5)
    world.now += 400
    world.use(make_key("newer", "other"), 5)
    assert on_device(world, A)
