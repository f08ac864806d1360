"""The adapters of waiting requests are evicted only for those that are needed sooner, and soon."""

from __future__ import annotations

from random import Random

import pytest

from loraplex.adapters.arena_planner import PATIENCE_SECONDS
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.adapters.reading import MAX_SUBMITTED
from loraplex.adapters.record import MIN_STAY_SECONDS, Departure
from support.blocks import make_key
from support.manager import ManagerWorld

SIZE = 4
SOON = 8
A, B, C = (make_key(name) for name in "ABC")
OTHERS = [make_key(f"other {index}") for index in range(SOON)]


def make_world(*used: AdapterKey) -> ManagerWorld:
    """These fill the arena, idle, each used later than the one before."""
    world = ManagerWorld(arena=SIZE * len(used), num_soon=SOON)
    for key in used:
        world.use(key, SIZE)
        world.now += 1
    return world


def test_of_many_that_requests_name_only_those_whose_turn_is_soon_are_fetched() -> None:
    world = ManagerWorld(num_soon=2)
    keys = [make_key(str(number)) for number in range(5)]
    for key in keys:
        world.manager.expect_last(key)
        assert world.manager.acquire(key, key.digest) is None
    assert world.wanted == keys[:2]


def test_the_next_one_is_fetched_when_one_was_leased_or_has_failed() -> None:
    world = ManagerWorld(num_soon=2)
    keys = [make_key(str(number)) for number in range(5)]
    for key in keys:
        world.manager.expect_last(key)
    world.fetch(keys[0], 2)
    world.settle()
    assert world.manager.acquire(keys[0], "user") is not None
    world.manager.fetch_failed(keys[1], "object_corrupt", "It is damaged.")
    for key in keys[2:]:
        world.manager.request(key)
    assert world.wanted == keys[1:4]


@pytest.mark.parametrize("num_jobs", [1, 20], ids=["reading", "copying"])
def test_what_is_needed_sooner_overtakes_what_waits_for_the_loader_threads(num_jobs: int) -> None:
    world = ManagerWorld(arena=SIZE * 40, num_soon=40)
    crowd = [make_key(f"crowd {index}") for index in range(20)]
    world.manager.expect(crowd)
    for key in crowd:
        world.fetch(key, SIZE)
    world.manager.poll()
    for _ in range(num_jobs):
        world.loaders.run()
        world.manager.poll()
    world.manager.expect([A, *crowd])
    world.fetch(A, SIZE)
    world.manager.poll()
    num_more = 0
    while world.manager.tier(A) is not Tier.DEVICE:
        world.loaders.run()
        world.manager.poll()
        num_more += 1
    assert num_more <= 2 * (2 * MAX_SUBMITTED + 1), "a few jobs before its read and its copy"


def test_a_wish_and_a_pin_need_no_turn() -> None:
    world = ManagerWorld(num_soon=1)
    world.manager.expect([A])
    world.manager.prefetch(B)
    world.manager.set_pinned([C])
    assert set(world.wanted) == {A, B, C}


def test_a_file_is_needed_until_it_was_read_or_could_not_be() -> None:
    world = ManagerWorld()
    for key in (A, B):
        world.manager.request(key)
    world.fetch(A, 2)
    world.fetch(B, OSError())
    assert world.read == []
    world.settle()
    assert sorted(world.read) == [A, B]


def test_what_no_request_waits_for_goes_first_however_lately_it_was_used() -> None:
    world = make_world(A, B)
    world.manager.expect([A])
    assert [status.eviction_order for status in world.reports.extents()] == [1, 0]
    world.load(C, SIZE)
    assert world.resident() == {A, C}


def test_of_what_requests_wait_for_the_last_one_goes_for_one_that_is_needed_sooner() -> None:
    world = make_world(A, B)
    world.manager.expect([C, A, B])
    world.load(C, SIZE)
    assert world.resident() == {A, C}


@pytest.mark.parametrize("next_uses", [[A, C], [*OTHERS, C, A]], ids=["later", "not soon"])
def test_what_is_needed_later_or_not_soon_waits_until_the_others_are_needed_no_more(
    next_uses: list[AdapterKey],
) -> None:
    world = make_world(A)
    world.manager.expect(next_uses)
    world.load(C, SIZE)
    assert world.resident() == {A}
    world.manager.expect([C])
    world.load(C, SIZE)
    assert world.resident() == {C}


def test_what_a_request_named_just_now_makes_no_room_for_one_behind_it() -> None:
    world = make_world(A)
    world.manager.expect_last(A)
    world.manager.expect_last(C)
    world.load(C, SIZE)
    assert world.resident() == {A}
    world.manager.expect([])
    world.settle()
    assert world.resident() == {C}


def test_once_a_request_has_it_no_turn_keeps_an_adapter() -> None:
    world = make_world(A, B)
    world.manager.expect([A])
    world.manager.acquire(A, "user")
    world.manager.release("user")
    world.manager.acquire(B, "another")
    world.load(C, SIZE)
    assert world.resident() == {B, C}


def test_a_pin_makes_room_for_itself_whoever_waits() -> None:
    world = make_world(A, B)
    world.manager.expect([A, B])
    world.manager.set_pinned([C])
    world.load(C, SIZE)
    assert world.resident() == {A, C}


def test_those_whose_turn_is_next_are_asked_for_again() -> None:
    world = make_world(A)
    world.load(B, SIZE)
    assert world.resident() == {B}
    world.manager.acquire(B, "user")
    world.now += 1
    world.manager.expect([A])
    world.manager.release("user")
    world.settle()
    assert world.resident() == {A}


def test_patience_begins_when_the_turn_is_near() -> None:
    world = make_world(A, B)
    world.load(B, SIZE)
    for key in (A, B):
        world.manager.acquire(key, key.digest)
    world.load(C, SIZE)
    world.manager.expect([*OTHERS, C])
    for _ in range(2):  # far at first, then near
        world.now += PATIENCE_SECONDS - 0.1
        world.settle()
        assert world.manager.acquire(A, "another") is not None
        assert world.manager.acquire(B, "yet another") is not None
        world.manager.expect([C])
    world.now += 0.2
    world.settle()
    is_leaving = [world.manager.acquire(key, f"late {key.digest}") is None for key in (A, B)]
    assert sorted(is_leaving) == [False, True]


def test_who_waited_too_long_is_not_held_up_by_one_whose_turn_came_just_now_before_it() -> None:
    world = make_world(A, B)
    for key in (A, B):
        world.manager.acquire(key, key.digest)
    *_, far = OTHERS
    world.manager.expect([C, *OTHERS])
    world.load(C, SIZE)
    world.load(far, SIZE)
    world.now += PATIENCE_SECONDS
    world.manager.expect([far, C])
    world.settle()
    for key in (A, B):
        world.manager.release(key.digest)
    world.settle()
    assert C in world.resident()
    assert world.reports.tier_stats().evictions[Departure.DRAINED] == 1


def test_what_is_needed_later_gives_way_in_host_memory_too() -> None:
    world = ManagerWorld(arena=SIZE, host=SIZE, num_soon=SOON)
    world.load(A, SIZE)
    world.manager.acquire(A, "user")
    world.manager.expect([B, C])
    world.load(B, SIZE)
    world.load(C, SIZE)
    assert [world.manager.tier(key) for key in (B, C)] == [Tier.HOST, Tier.DISK]
    world.manager.expect([C, *OTHERS, B])
    world.settle()
    assert [world.manager.tier(key) for key in (B, C)] == [Tier.DISK, Tier.HOST]
    world.now += MIN_STAY_SECONDS
    world.manager.release("user")
    world.settle()
    assert world.resident() == {C}


@pytest.mark.parametrize("host", [24, 8, 3])
def test_a_burst_for_more_adapters_than_fit_loads_each_of_them_once(host: int) -> None:
    room, num_running = 6, 3
    burst = [make_key(f"burst {index}") for index in range(4 * room)]
    world = ManagerWorld(arena=SIZE * room, host=SIZE * host)
    for key in burst:
        world.manager.expect_last(key)
    waiting = list(burst)
    running: list[AdapterKey] = []
    for _ in range(100 * len(burst)):
        world.now += MIN_STAY_SECONDS
        world.manager.expect(waiting)
        for key in set(world.wanted):
            world.fetch(key, SIZE)
        world.settle()
        for key in list(waiting):
            if len(running) < num_running and world.manager.acquire(key, key.digest):
                waiting.remove(key)
                running.append(key)
        if len(running) == num_running or not waiting:
            world.manager.release(running.pop(0).digest)
        if not waiting and not running:
            break
    assert not waiting
    assert world.manager.num_loads == len(burst)


def test_whoever_leaves_had_a_later_turn_than_one_that_comes() -> None:
    num_left = sum(num_evicted_by_next_use(Random(seed)) for seed in range(100))
    assert num_left > 500


def num_evicted_by_next_use(rng: Random) -> int:
    """The number of evictions in an arbitrary order of calls, each of them allowed.

    An adapter that has waited too long may evict any other one: such rounds are not checked.
    """
    num_soon = rng.randint(1, 3)
    names = [make_key(f"{index}", rng.choice("xy")) for index in range(8)]
    world = ManagerWorld(arena=4 * SIZE, host=len(names) * SIZE, num_soon=num_soon)
    next_uses: list[AdapterKey] = []
    held: list[str] = []
    num_left = num_drained = 0
    for number in range(40):
        before = {key for key in names if world.manager.tier(key) is Tier.DEVICE}
        next_uses = rng.sample(names, rng.randint(0, len(names)))
        world.manager.expect(next_uses)
        leased = rng.choice(names)
        if world.manager.acquire(leased, f"{number}"):
            held.append(f"{number}")
            next_uses = [AdapterKey("", "") if key == leased else key for key in next_uses]
        if held and rng.random() < 0.5:
            world.manager.release(held.pop(rng.randrange(len(held))))
        for key in set(world.wanted):
            world.fetch(key, SIZE)
        world.settle()
        world.now += 1.1  # longer than the stay of an adapter that nobody has leased
        now = {key for key in names if world.manager.tier(key) is Tier.DEVICE}
        was_patient, num_drained = num_drained == count_drained(world), count_drained(world)
        if was_patient:
            for key in before - now:
                assert any(makes_room(key, new, next_uses, num_soon) for new in now - before)
            num_left += len(before - now)
    return num_left


def count_drained(world: ManagerWorld) -> int:
    return world.reports.tier_stats().evictions[Departure.DRAINED]


def makes_room(
    key: AdapterKey, newcomer: AdapterKey, next_uses: list[AdapterKey], num_soon: int
) -> bool:
    """Whether `newcomer` may have the place of `key`."""
    if key not in next_uses:
        return True
    soon = next_uses[:num_soon]
    if newcomer not in soon:
        return False
    return key not in soon or soon.index(newcomer) < soon.index(key)
