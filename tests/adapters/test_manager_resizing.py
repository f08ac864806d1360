"""The arena grows and shrinks while it holds adapters."""

from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.record import MIN_STAY_SECONDS, Departure
from support.manager import FakeArena, ManagerWorld

UNIT = FakeArena.element_bytes
A, B, C, D = (AdapterKey("acme", f"sha256:{name}") for name in "abcd")


@pytest.fixture
def world() -> ManagerWorld:
    """An arena of 10 that may grow to 20, with three adapters of 3: the oldest is A."""
    world = ManagerWorld(arena=10, reserved=20)
    for key in (A, B, C):
        world.use(key, 3)
        world.now += 1
    return world


def shrink(world: ManagerWorld, capacity: int) -> None:
    world.manager.resize(capacity * UNIT)
    for _ in range(4):
        world.settle()


def test_a_larger_arena_has_room_at_once(world: ManagerWorld) -> None:
    world.manager.resize(14 * UNIT)
    world.load(D, 5)
    assert world.resident() == {A, B, C, D}
    assert world.manager.arena_bytes == 14 * UNIT


def test_a_smaller_arena_evicts_the_least_recently_used_and_moves_the_others(
    world: ManagerWorld,
) -> None:
    shrink(world, 6)
    assert world.resident() == {B, C}
    assert world.manager.arena_bytes == 6 * UNIT
    assert world.reports.tier_stats().evictions[Departure.KV] == 1
    world.arena.extents.check()


def test_free_elements_at_the_end_go_without_an_eviction(world: ManagerWorld) -> None:
    shrink(world, 9)
    assert world.resident() == {A, B, C}
    assert not world.manager.is_shrinking


def test_a_leased_adapter_is_waited_for(world: ManagerWorld) -> None:
    assert world.manager.acquire(C, "user")  # at the end
    shrink(world, 7)
    assert world.manager.is_shrinking
    assert world.manager.arena_bytes == 10 * UNIT
    world.manager.release("user")
    world.now += MIN_STAY_SECONDS
    for _ in range(4):
        world.settle()
    assert world.manager.arena_bytes == 7 * UNIT
    assert C in world.resident()


def test_what_is_to_be_taken_away_is_not_given_to_adapters(world: ManagerWorld) -> None:
    assert world.manager.acquire(C, "user")
    shrink(world, 7)
    world.load(D, 4)
    placed = [extent for extent in world.reports.extents() if extent.key == D]
    assert all(use.offset_bytes + use.num_bytes <= 7 * UNIT for use in placed)


def test_a_pinned_adapter_stays_and_the_change_can_be_withdrawn(world: ManagerWorld) -> None:
    world.manager.set_pinned([C])
    shrink(world, 2)
    assert world.manager.is_shrinking
    assert C in world.resident()
    world.manager.resize(world.manager.arena_bytes)
    assert not world.manager.is_shrinking
    assert world.manager.acquire(C, "user")


def test_an_adapter_that_fits_only_a_larger_arena_waits_and_says_so() -> None:
    world = ManagerWorld(arena=4, reserved=20)
    world.load(A, 6)
    assert world.manager.failure(A) is None
    assert world.manager.awaited_room == 6 * UNIT
    world.manager.resize(8 * UNIT)
    world.settle()
    assert world.resident() == {A}
    assert world.manager.awaited_room == 0


def test_an_adapter_that_no_border_has_room_for_fails() -> None:
    world = ManagerWorld(arena=4, reserved=20)
    world.load(A, 21)
    failure = world.manager.failure(A)
    assert failure is not None
    assert failure.code == "adapter_too_large"


def test_loads_of_what_was_evicted_a_short_while_ago_are_counted(world: ManagerWorld) -> None:
    world.manager.remember_evicted(3 * UNIT)
    world.use(D, 3)
    assert A not in world.resident()
    assert world.manager.reload_seconds == 0
    world.now += 1
    world.manager.request(A)
    world.now += 0.5
    world.settle()
    assert A in world.resident()
    assert world.manager.reload_seconds == pytest.approx(0.5)
