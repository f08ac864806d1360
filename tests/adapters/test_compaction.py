"""Compaction moves adapters only if that joins enough free space, and no more than necessary."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters import compaction
from loraplex.adapters.compaction import (
    MAX_MOVED_PER_PLACED,
    MAX_TRIED_WINDOWS,
    plan_compaction,
)
from loraplex.adapters.eviction import FREE, Cost, Occupant
from loraplex.adapters.extents import Extent, ExtentAllocator
from loraplex.adapters.manager import Tier
from loraplex.adapters.record import UNCLAIMED_STAY_SECONDS
from support.blocks import make_key
from support.manager import ManagerWorld

CAPACITY = 24
A, B, C, D = (make_key(name) for name in "abcd")


@st.composite
def lines(draw: st.DrawFn) -> list[Occupant]:
    bounds = sorted(draw(st.sets(st.integers(0, CAPACITY), max_size=10)))
    kinds = st.sampled_from(["movable", "movable", "fixed", "vanishing", "hole"])
    found = []
    for start, end in pairwise(bounds):
        extent, key = Extent(start, end - start), make_key(f"at {start}")
        match draw(kinds):
            case "movable":
                found.append(Occupant(extent, key, Cost(1, 0.0)))
            case "fixed":
                found.append(Occupant(extent, key, None))
            case "vanishing":
                found.append(Occupant(extent, None, FREE))
    return found


@given(occupants=lines(), size=st.integers(1, CAPACITY))
def test_what_is_planned_can_be_done(occupants: list[Occupant], size: int) -> None:
    """Replayed on the real allocator: every mover finds a place, and the window comes free."""
    plan = plan_compaction(size, capacity=CAPACITY, occupants=occupants)
    if plan is None:
        return
    assert plan.window.size >= size
    inside = [other for other in occupants if other.extent.overlaps(plan.window)]
    assert all(other.cost is not None for other in inside)
    assert sorted(plan.movers) == sorted(other.key for other in inside if other.key)
    by_key = {other.key: other.extent for other in occupants if other.key}
    sizes = [by_key[key].size for key in plan.movers]
    assert sum(sizes) <= MAX_MOVED_PER_PLACED * size
    allocator = ExtentAllocator(CAPACITY)
    free = [Extent(0, CAPACITY)]
    for other in occupants:
        free = [part for run in free for part in run.without(other.extent)]
    _fill(allocator, free)
    for key in plan.movers:
        target = allocator.allocate(by_key[key].size, avoid=[plan.window])
        assert target is not None
        assert not target.overlaps(plan.window)


def _fill(allocator: ExtentAllocator, free: list[Extent]) -> None:
    """Allocate all but these runs."""
    cells = [allocator.allocate(1) for _ in range(CAPACITY)]
    for cell in cells:
        assert cell is not None
        if any(run.overlaps(cell) for run in free):
            allocator.free(cell)


@given(occupants=lines(), size=st.integers(1, CAPACITY))
def test_there_is_no_plan_where_the_free_room_would_not_do(
    occupants: list[Occupant], size: int
) -> None:
    used = sum(other.extent.size for other in occupants)
    if CAPACITY - used < size:
        assert plan_compaction(size, capacity=CAPACITY, occupants=occupants) is None


@pytest.mark.parametrize("gap", [9, 10])
def test_a_plan_among_a_thousand_adapters_does_not_hold_up_a_step(
    gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one that needs hundreds of small ones moved, where it finds a plan and where not:
    of the many windows few are tried, which is what takes time.
    """
    tried = Mock(wraps=compaction._fit)
    monkeypatch.setattr(compaction, "_fit", tried)
    occupants = [
        Occupant(Extent(start * (10 + gap), 10), make_key(str(start)), Cost(1, 0.0))
        for start in range(1000)
    ]
    plan = plan_compaction(500 * gap, capacity=1000 * (10 + gap), occupants=occupants)
    assert (plan is not None) == (gap == 10)
    assert 1 <= tried.call_count <= MAX_TRIED_WINDOWS


def fragmented() -> ManagerWorld:
    """A at 0 to 3, C at 6 to 9, and free runs of 3 and 3 beside them: 12 in all."""
    world = ManagerWorld(arena=12)
    for key in (A, B, C):
        world.use(key, 3)
    world.manager.evict(B)
    world.settle()
    world.evicted()
    return world


def test_free_runs_are_joined_by_a_move_instead_of_an_eviction() -> None:
    world = fragmented()
    assert world.arena.largest_free == 3
    world.now += UNCLAIMED_STAY_SECONDS
    world.load(D, 6)
    assert all(world.manager.tier(key) is Tier.DEVICE for key in (A, C, D))
    figures = world.reports.tier_stats()
    assert (world.manager.num_evictions, figures.num_moves, figures.moved_bytes) == (0, 1, 6)
    for key in (A, C, D):
        lease = world.manager.acquire(key, key.digest)
        assert lease is not None
        assert world.arena.published.get(lease.row) == (key, lease.generation)


def test_nobody_leases_what_moves_and_its_new_place_has_a_row_of_its_own() -> None:
    world = fragmented()
    old = {}
    for key in (A, C):
        lease = world.manager.acquire(key, f"look {key.digest}")
        assert lease is not None
        old[key] = lease
        world.manager.release(lease.request_id)
    world.manager.request(D)
    world.fetch(D, 6)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    moving = [key for key in (A, C) if world.manager.acquire(key, f"r {key.digest}") is None]
    assert len(moving) == 1
    for key in (A, C):
        world.manager.release(f"r {key.digest}")
    world.settle()
    lease = world.manager.acquire(moving[0], "again")
    assert lease is not None
    assert world.arena.published.get(lease.row) == (lease.key, lease.generation)
    assert lease.generation != old[moving[0]].generation
    assert world.arena.published.get(old[moving[0]].row) != (moving[0], old[moving[0]].generation)


def test_a_move_ends_though_whom_it_was_for_is_deleted_meanwhile() -> None:
    world = fragmented()
    world.now += UNCLAIMED_STAY_SECONDS
    world.manager.request(D)
    world.fetch(D, 6)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    world.manager.evict(D)
    assert len(world.loaders) == 2
    world.loaders.run(1)
    world.manager.poll()
    assert world.evicted() == [D]
    world.loaders.run()
    assert world.manager.poll(), "only the move was left"
    assert world.reports.tier_stats().num_moves == 1


def test_a_leased_adapter_is_not_moved() -> None:
    world = fragmented()
    leases = [world.manager.acquire(key, key.digest) for key in (A, C)]
    world.load(D, 6)
    assert world.manager.tier(D) is Tier.HOST
    for lease in leases:
        assert lease is not None
        assert world.arena.published.get(lease.row) == (lease.key, lease.generation)
    assert world.reports.tier_stats().num_moves == 0


def test_a_move_that_fails_leaves_the_adapter_to_be_evicted() -> None:
    world = fragmented()
    world.now += UNCLAIMED_STAY_SECONDS
    world.manager.request(D)
    world.fetch(D, 6)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    world.loaders.run(error=RuntimeError("device lost"))
    world.settle()
    assert world.manager.tier(D) is Tier.DEVICE
    assert world.manager.num_evictions == 1
    assert world.reports.tier_stats().num_moves == 0
    assert world.arena.used == 9


def test_deleting_an_adapter_that_moves_waits_for_the_move() -> None:
    world = fragmented()
    world.manager.request(D)
    world.fetch(D, 6)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    world.manager.evict(A)
    world.manager.evict(C)
    world.settle()
    assert sorted(world.evicted()) == [A, C]
    assert set(world.arena.cells) == {None, D}
