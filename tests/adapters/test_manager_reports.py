"""Explanations of an adapter's state, counters, and leases whose requests have ended."""

from __future__ import annotations

from loraplex.adapters.histories import MAX_ADAPTERS, MAX_TRANSITIONS, Histories
from loraplex.adapters.load_times import BOUNDS, LoadTimes
from loraplex.adapters.manager import Failure, Tier
from loraplex.adapters.record import UNCLAIMED_STAY_SECONDS, Departure, State
from loraplex.adapters.status import AdapterTransition
from support.blocks import make_key
from support.manager import ManagerWorld

A, B, C = (make_key(name) for name in "abc")


def test_an_explanation_follows_an_adapter_through_its_load() -> None:
    world = ManagerWorld(arena=10)
    manager = world.manager
    assert manager.reports.explain(A).state == "stored"
    assert manager.reports.explain(A).since_seconds is None
    manager.request(A)
    world.now += 2
    found = manager.reports.explain(A)
    assert (found.state, found.tier, found.since_seconds) == ("fetching", Tier.STORE, 2)
    assert found.needed_bytes is None
    world.fetch(A, 4)
    world.settle()
    found = manager.reports.explain(A)
    assert (found.state, found.tier, found.needed_bytes) == ("resident", Tier.DEVICE, 8)
    assert (found.free_bytes, found.largest_free_bytes, found.leased_bytes) == (12, 12, 0)
    states = [transition.state for transition in found.transitions]
    assert states == ["fetching", "reading", "host", "loading", "resident"]
    manager.acquire(A, "r")
    assert manager.reports.explain(A).leased_bytes == 8


def test_an_explanation_gives_the_reason_of_a_failure_and_the_time_of_the_next_attempt() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.manager.fetch_failed(A, "object_not_found", "no such object")
    found = world.reports.explain(A)
    assert found.state == "failed"
    assert found.reason == Failure("object_not_found", "no such object")
    assert found.retry_in_seconds == 0.5
    assert found.transitions[-1] == AdapterTransition("failed", 0.0, "object_not_found")


def test_an_explanation_says_how_many_loads_are_ahead_and_what_holds_the_room() -> None:
    world = ManagerWorld(arena=10)
    world.load(A, 8)
    world.manager.acquire(A, "r")
    world.load(B, 6)
    world.load(C, 4)
    found = world.reports.explain(C)
    assert (found.state, found.order, found.needed_bytes) == ("host", 1, 8)
    assert (found.free_bytes, found.leased_bytes) == (4, 16)
    assert world.reports.explain(B).order == 0
    assert world.reports.explain(A).order == 0


def test_an_explanation_remembers_why_an_adapter_left_the_device() -> None:
    world = ManagerWorld(arena=4)
    world.use(A, 4)
    world.now += UNCLAIMED_STAY_SECONDS
    world.use(B, 4)
    found = world.reports.explain(A)
    assert (found.state, found.tier) == ("stored", Tier.HOST)
    assert found.transitions[-1].reason == Departure.SHARE
    world.manager.evict(B)
    assert world.reports.explain(B).state == "deleting"


def test_awaited_bytes_are_those_that_waiting_requests_need_and_the_device_has_not() -> None:
    world = ManagerWorld(arena=20)
    manager = world.manager
    world.load(A, 8)
    assert world.reports.tier_stats().awaited_bytes == 0  # no request needs it
    manager.expect([A, B])
    world.fetch(B, 4)
    manager.poll()
    assert world.reports.tier_stats().awaited_bytes == 16  # as large as the one on the device
    world.loaders.run_all()
    manager.poll()
    assert world.reports.tier_stats().awaited_bytes == 8
    world.settle()
    assert world.reports.tier_stats().awaited_bytes == 0
    assert world.reports.tier_stats().loaded_bytes == 24


def test_histories_are_bounded() -> None:
    histories = Histories()
    for number in range(3 * MAX_TRANSITIONS):
        histories.note(A, "failed", float(number))
    assert [t.at for t in histories.of(A)][-1] == 3 * MAX_TRANSITIONS - 1
    assert len(histories.of(A)) == MAX_TRANSITIONS
    for number in range(MAX_ADAPTERS):
        histories.note(make_key(str(number)), "fetching", 0.0)
    assert histories.of(A) == ()
    assert len(histories.of(make_key("0"))) == 1


def test_the_stages_of_a_load_are_timed_each_for_itself() -> None:
    world = ManagerWorld(arena=4)
    world.manager.request(A)
    world.now += 2
    world.fetch(A, 4)
    world.manager.poll()
    world.now += 0.2
    world.loaders.run()
    world.manager.poll()
    world.now += 0.02
    world.loaders.run()
    world.manager.poll()
    found = world.reports.tier_stats().load_seconds
    seconds = {stage: round(histogram.sum, 6) for stage, histogram in found.items()}
    assert seconds == {"fetch": 2.0, "read": 0.2, "wait": 0.0, "copy": 0.02}
    assert all(sum(histogram.counts) == 1 for histogram in found.values())
    assert round(world.manager.load_seconds(A), 6) == 2.22


def test_a_failed_stage_is_not_counted_as_passed() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.now += 1
    world.manager.fetch_failed(A, "store_unavailable", "no answer")
    world.now += 100
    world.load(A, 4)
    found = world.reports.tier_stats().load_seconds
    assert sum(found["fetch"].counts) == 1
    assert found["fetch"].sum == 0


def test_seconds_fall_into_the_bucket_whose_bound_they_reach() -> None:
    times = LoadTimes()
    for seconds in (0.0, BOUNDS[0], BOUNDS[-1], BOUNDS[-1] + 1):
        times.add(State.HOST, seconds)
    times.add(State.RESIDENT, 5.0)
    counts = times.snapshot()["wait"].counts
    assert (counts[0], counts[len(BOUNDS) - 1], counts[len(BOUNDS)]) == (2, 1, 1)
    assert sum(counts) == 4
    assert sum(times.snapshot()["copy"].counts) == 0


def test_leases_of_requests_that_are_gone_are_released_and_counted() -> None:
    world = ManagerWorld(arena=4)
    for request_id in ("alive", "gone", "lost"):
        world.load(A, 4)
        assert world.manager.acquire(A, request_id) is not None
    assert world.manager.reap(["alive", "unrelated"]) == ["gone", "lost"]
    assert world.reports.tier_stats().num_leases_reaped == 2
    assert world.reports.explain(A).leased_bytes == 8
    assert world.manager.reap(["alive"]) == []
    world.manager.release("gone")
    assert [status.num_leases for status in world.reports.snapshot()] == [1]
    world.manager.release("alive")
    world.load(B, 4)
    world.now += UNCLAIMED_STAY_SECONDS
    world.settle()
    assert world.manager.tier(B) is Tier.DEVICE


def test_a_map_shows_who_lies_where_and_who_would_go_first() -> None:
    world = ManagerWorld(arena=20)
    manager = world.manager
    for key, size in ((A, 4), (B, 4), (C, 2)):
        world.use(key, size)
        world.now += UNCLAIMED_STAY_SECONDS
    manager.set_pinned([B])
    manager.acquire(C, "r")
    found = {extent.key: extent for extent in manager.reports.extents()}
    assert [extent.key for extent in manager.reports.extents()] == [A, B, C], "by offset"
    assert [(found[key].offset_bytes, found[key].num_bytes) for key in (A, B, C)] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    assert [found[key].state for key in (A, B, C)] == ["idle", "idle", "leased"]
    assert [found[key].is_pinned for key in (A, B, C)] == [False, True, False]
    assert [found[key].num_leases for key in (A, B, C)] == [0, 0, 1]
    assert [found[key].eviction_order for key in (A, B, C)] == [0, None, None]
    assert (found[A].idle_seconds, found[C].idle_seconds) == (3 * UNCLAIMED_STAY_SECONDS, 0.0)


def test_who_goes_first_is_who_does() -> None:
    world = ManagerWorld(arena=12)
    for key in (B, A, C):
        world.use(key, 4)
        world.now += UNCLAIMED_STAY_SECONDS
    ordered = [extent for extent in world.reports.extents() if extent.eviction_order is not None]
    first = min(ordered, key=lambda extent: extent.eviction_order or 0).key
    world.use(make_key("d", "other"), 4)
    assert first not in {extent.key for extent in world.reports.extents()}


def test_a_map_shows_what_is_on_its_way_and_what_is_in_host_memory() -> None:
    world = ManagerWorld(arena=10)
    world.use(A, 4)
    world.manager.request(B)
    world.fetch(B, 2)
    while not world.reports.extents()[1:]:
        world.manager.poll()
        if world.loaders and len(world.reports.extents()) < 2:
            world.loaders.run()
    assert {extent.key: extent.state for extent in world.reports.extents()}[B] == "loading"
    assert [(entry.key, entry.num_bytes) for entry in world.reports.host_entries()] == [
        (A, 8),
        (B, 4),
    ]
    assert {entry.key: entry.is_in_use for entry in world.reports.host_entries()}[B]
