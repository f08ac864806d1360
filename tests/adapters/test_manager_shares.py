"""A tenant that uses many adapters evicts its own, not those of others."""

from __future__ import annotations

import random

import pytest

from loraplex.adapters.arena_planner import PATIENCE_SECONDS
from loraplex.adapters.byte_shares import Holding, find_surplus
from loraplex.adapters.manager import Tier
from loraplex.adapters.record import MIN_STAY_SECONDS, UNCLAIMED_STAY_SECONDS, Departure
from support.blocks import make_key
from support.manager import ManagerWorld

MINE = [make_key(f"mine {index}", "me") for index in range(2)]


@pytest.mark.parametrize("seed", range(5))
def test_a_parade_of_one_tenants_adapters_leaves_the_others_working_sets_alone(seed: int) -> None:
    """Without shares the least recently used goes, which is nearly always mine."""
    world = ManagerWorld(arena=12, host=1000)
    rng = random.Random(seed)
    for key in MINE:
        world.use(key, 2)
    num_loads = world.manager.num_loads
    for turn in range(200):
        world.now += UNCLAIMED_STAY_SECONDS
        world.use(make_key(str(turn), "parade"), rng.choice((1, 2, 4)), f"p{turn}")
        if turn % 5 == 0:
            for key in MINE:
                assert world.manager.acquire(key, f"{key.digest} {turn}") is not None
                world.manager.release(f"{key.digest} {turn}")
    assert world.manager.num_loads == num_loads + 200
    assert world.reports.tier_stats().evictions[Departure.SHARE] > 100


def test_a_burst_that_cannot_evict_its_own_waits_for_its_turn() -> None:
    world = ManagerWorld(arena=12)
    for key in MINE:
        world.use(key, 2)
    parade = [make_key(str(index), "parade") for index in range(4)]
    for key in parade[:2]:
        world.load(key, 4)
        assert world.manager.acquire(key, key.digest) is not None
    world.load(parade[2], 4)
    assert world.manager.tier(parade[2]) is Tier.HOST
    assert all(world.manager.tier(key) is Tier.DEVICE for key in MINE)
    world.now += MIN_STAY_SECONDS
    world.manager.release(parade[0].digest)
    world.settle()
    assert world.manager.tier(parade[2]) is Tier.DEVICE
    assert all(world.manager.tier(key) is Tier.DEVICE for key in MINE)


def test_what_others_have_not_used_for_long_may_go() -> None:
    world = ManagerWorld(arena=12)
    for key in MINE:
        world.use(key, 2)
    world.now += 1000
    for name, size in (("a", 8), ("b", 4)):
        world.load(make_key(name, "parade"), size)
        assert world.manager.acquire(make_key(name, "parade"), name) is not None
    assert not any(world.manager.tier(key) is Tier.DEVICE for key in MINE)


def test_patience_ends_also_for_who_is_beyond_its_share() -> None:
    world = ManagerWorld(arena=12)
    for key in MINE:
        world.use(key, 2)
    large = make_key("large", "parade")
    world.load(large, 12)
    assert world.manager.tier(large) is Tier.HOST
    world.now += PATIENCE_SECONDS
    world.settle()
    assert world.manager.tier(large) is Tier.DEVICE


def test_the_surplus_is_what_is_least_recently_used_of_what_a_tenant_has_too_many() -> None:
    holdings = [
        Holding(make_key("new", "x"), 3, 2.0, may_go=True),
        Holding(make_key("old", "x"), 3, 1.0, may_go=True),
        Holding(make_key("leased", "x"), 3, 0.0, may_go=False),
        Holding(make_key("modest", "y"), 3, 0.0, may_go=True),
        Holding(make_key("gone", "z"), 1, 9.0, may_go=True),
    ]
    active = frozenset({"x", "y"})
    new = make_key("new", "y")
    found = find_surplus(holdings, capacity=13, active=active, newcomer=new, newcomer_size=3)
    assert found.keys == {make_key("old", "x"), make_key("gone", "z")}
    assert not found.is_newcomer_beyond
    found = find_surplus(
        holdings, capacity=13, active=active, newcomer=make_key("n", "x"), newcomer_size=3
    )
    assert found.keys == {make_key("old", "x"), make_key("new", "x"), make_key("gone", "z")}
    assert found.is_newcomer_beyond
