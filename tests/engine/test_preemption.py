"""Who gives way to whom, what it keeps, and when it comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.block_pool import NULL_BLOCK
from loraplex.engine.kv.layout import CopyBlock, SwapIn, SwapOut
from loraplex.engine.kv.sequence_blocks import SequenceBlocks, block_table
from loraplex.engine.scheduling.batch import ScheduledBatch
from loraplex.engine.scheduling.preemption import RECLAIM_SECONDS, RECLAIM_STEPS
from loraplex.engine.scheduling.running import MAX_PREEMPTIONS
from loraplex.engine.scheduling.shares import Shares
from loraplex.engine.scheduling.step_costs import StepCosts, StepShape
from loraplex.engine.scheduling.swap_costs import SwapCosts
from support.scheduling import SchedulerBench, counts, steps_until

A = AdapterKey("acme", "sha256:aa")


def test_a_victim_is_passed_by_nobody_of_its_tenant_however_urgent() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("old", 16, max_tokens=20)
    bench.add("new", 16, max_tokens=20)
    steps_until(bench, lambda: bench.scheduler.num_preemptions)
    bench.add("urgent", 4, priority=-9)
    bench.step()
    assert (bench.state("new"), bench.state("urgent")) == ("waiting", "waiting")
    bench.run()
    assert set(bench.finished) == {"old", "new", "urgent"}


def test_a_tenants_only_request_is_given_room_even_beyond_its_cap() -> None:
    bench = SchedulerBench(num_blocks=40, budget=200, tenant_cap=0.2, step_seconds=0.05)
    for index in range(5):
        bench.add(f"a{index}", 24, max_tokens=8, tenant="greedy")
    bench.step()
    bench.add("only", 40, max_tokens=2, tenant="late")
    assert steps_until(bench, lambda: bench.state("only") == "running") <= 3


def test_a_tenants_first_request_is_given_room_even_beyond_its_share() -> None:
    bench = SchedulerBench(max_num_seqs=2, step_seconds=0.05)
    for index in range(2):
        bench.add(f"a{index}", 4, max_tokens=200, tenant="greedy")
    bench.step()
    for name in ("b", "c"):
        bench.add(name, 4, max_tokens=200, tenant=name)
    assert steps_until(bench, lambda: bench.state("b") == "running") <= 5


def full_batch(max_num_seqs: int = 4, tenant_cap: float = 1.0) -> SchedulerBench:
    """All places are taken, by one tenant."""
    bench = SchedulerBench(num_blocks=400, max_num_seqs=max_num_seqs, tenant_cap=tenant_cap)
    for index in range(max_num_seqs):
        bench.add(f"a{index}", 4, max_tokens=200, tenant="greedy")
    bench.step()
    return bench


def test_a_place_is_taken_back_after_so_many_steps_and_the_same_step_hands_it_on() -> None:
    bench = full_batch()
    bench.add("late", 4, tenant="late")
    for _ in range(RECLAIM_STEPS):
        bench.step()
        assert (bench.scheduler.num_reclaims, bench.state("late")) == (0, "waiting")
    assert counts(bench.step()) == {"a0": 1, "a1": 1, "a2": 1, "late": 4}
    assert (bench.scheduler.num_reclaims, bench.scheduler.num_preemptions) == (1, 1)


def test_a_place_is_taken_back_after_so_many_seconds() -> None:
    bench = full_batch()
    bench.add("late", 4, tenant="late")
    bench.now = RECLAIM_SECONDS * 0.99
    assert "late" not in counts(bench.step())
    bench.now = RECLAIM_SECONDS
    assert "late" in counts(bench.step())


@pytest.mark.parametrize(("num_running", "num_reclaims"), [(2, 1), (3, 0)])
def test_a_place_is_taken_back_up_to_the_cap_and_not_beyond(
    num_running: int, num_reclaims: int
) -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=10, tenant_cap=0.3, step_seconds=0.05)
    for tenant, count in (("greedy", 10 - num_running), ("late", num_running)):
        for index in range(count):
            bench.add(f"{tenant}{index}", 2, max_tokens=200, tenant=tenant)
        bench.step()
    bench.add("next", 4, max_tokens=200, tenant="late")
    for _ in range(2 * RECLAIM_STEPS):
        bench.step()
    assert bench.scheduler.num_reclaims == num_reclaims


def test_nobody_who_has_its_share_takes_more_though_another_is_above() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=6, step_seconds=0.05)
    for tenant, count in (("greedy", 4), ("content", 2)):
        for index in range(count):
            bench.add(f"{tenant}{index}", 4, max_tokens=200, tenant=tenant)
    bench.step()
    bench.add("cold", 4, adapter=A, tenant="other")
    bench.add("next", 4, max_tokens=200, tenant="content")
    for _ in range(2 * RECLAIM_STEPS):
        bench.step()
    assert bench.scheduler.num_reclaims == 0


def test_nobody_gives_what_it_is_entitled_to() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=4, step_seconds=0.05)
    for index in range(2):
        for tenant in ("a", "b"):
            bench.add(f"{tenant}{index}", 4, max_tokens=200, tenant=tenant)
    bench.step()
    bench.add("late", 4, tenant="c")
    for _ in range(2 * RECLAIM_STEPS):
        bench.step()
    assert bench.scheduler.num_reclaims == 0


def test_as_many_requests_give_their_blocks_as_the_late_one_needs() -> None:
    bench = SchedulerBench(num_blocks=40, budget=200, step_seconds=0.05)
    for index in range(8):
        bench.add(f"a{index}", 17, max_tokens=9, tenant="greedy")
    bench.step()
    assert bench.kv.num_free(0) == 0
    bench.add("late", 31, max_tokens=2, tenant="late")
    steps_until(bench, lambda: bench.scheduler.num_reclaims)
    assert bench.state("late") == "waiting", "one is not enough"
    steps_until(bench, lambda: bench.state("late") == "running")
    assert bench.scheduler.num_reclaims == 2


def test_nothing_is_taken_back_from_a_last_request_that_has_given_way_often() -> None:
    bench = SchedulerBench(num_blocks=40, budget=200, step_seconds=0.05)
    long = bench.add("long", 144, max_tokens=12, tenant="long")
    bench.step()
    long.num_preemptions = MAX_PREEMPTIONS
    bench.add("late", 40, tenant="late")
    steps_until(bench, lambda: "long" in bench.finished)
    assert bench.scheduler.num_preemptions == 0


def test_a_weight_that_was_changed_counts_from_the_tenants_next_request_on() -> None:
    bench = SchedulerBench(budget=100)
    large = bench.add("large", 24, max_tokens=9, tenant="a")
    small = bench.add("small", 16, max_tokens=9, tenant="b")
    bench.step()
    running = bench.scheduler._running
    assert running.victim(running.kv_share) is large
    bench.add("next", 4, max_tokens=9, tenant="a", weight=9.0)
    bench.step()
    assert running.victim(running.kv_share) is small


def test_a_tenant_is_entitled_to_more_once_others_have_left() -> None:
    shares = Shares()
    a, b = (
        cast(Any, SimpleNamespace(tenant_id=name, tenant_weight=weight))
        for name, weight in (("a", 1.0), ("b", 3.0))
    )
    for request in (a, b, b):
        shares.enter(request)
    assert (shares.of("a"), shares.of("b")) == (0.25, 0.75)
    shares.leave(b)
    assert shares.of("a") == 0.25
    shares.leave(b)
    assert shares.of("a") == 1.0


def test_an_urgent_request_displaces_the_newest_of_the_lowest_priority_in_the_same_step() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=3)
    for name, priority in (("low", 2), ("newest low", 2), ("normal", 0)):
        bench.add(name, 4, max_tokens=6, priority=priority)
    bench.step()
    bench.add("urgent", 4, priority=-1)
    assert counts(bench.step()) == {"low": 1, "normal": 1, "urgent": 4}
    assert bench.scheduler.num_displaced == 1
    bench.run()
    assert bench.finished == {"low": 6, "newest low": 6, "normal": 6, "urgent": 1}


@pytest.mark.parametrize("priority", [0, 1])
def test_nobody_displaces_an_equal_or_the_more_urgent(priority: int) -> None:
    bench = full_batch()
    bench.add("next", 4, priority=priority, tenant="greedy")
    bench.step()
    assert (bench.scheduler.num_displaced, bench.state("next")) == (0, "waiting")


def test_nobody_displaces_a_request_of_another_tenant() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=2)
    for index in range(2):
        bench.add(f"a{index}", 4, max_tokens=200, tenant="a", priority=9)
    bench.step()
    bench.add("urgent", 4, tenant="b", priority=-9)
    bench.step()
    assert (bench.scheduler.num_displaced, bench.state("urgent")) == (0, "waiting")


@pytest.mark.parametrize(("seconds", "num_displaced"), [(59.0, 1), (60.0, 0)])
def test_who_arrived_long_enough_ago_is_displaced_by_nobody(
    seconds: float, num_displaced: int
) -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=1)
    bench.add("low", 4, max_tokens=200, priority=1)
    bench.step()
    bench.now = seconds
    bench.add("urgent", 4, priority=-1)
    bench.step()
    assert bench.scheduler.num_displaced == num_displaced


def test_the_displaced_come_back_after_the_more_urgent_that_wait() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=1)
    bench.add("low", 4, max_tokens=3, priority=1)
    bench.step()
    for name in ("first", "second"):
        bench.add(name, 4, max_tokens=2)
    bench.run()
    assert list(bench.finished) == ["first", "second", "low"]


def test_as_many_are_displaced_as_give_the_blocks_that_are_lacking() -> None:
    bench = SchedulerBench(num_blocks=40, budget=200)
    for index in range(4):
        bench.add(f"low{index}", 33, max_tokens=3, priority=1)
    bench.step()
    bench.add("urgent", 60)
    bench.step()
    assert (bench.scheduler.num_displaced, bench.state("urgent")) == (2, "gone")
    bench.run()
    assert all(bench.finished[f"low{index}"] == 3 for index in range(4))


def test_nobody_is_displaced_where_all_would_not_give_enough_blocks() -> None:
    bench = SchedulerBench(num_blocks=40, budget=200)
    bench.add("other", 120, max_tokens=9, tenant="b")
    bench.add("low", 20, max_tokens=9, priority=1)
    bench.step()
    bench.add("urgent", 60)
    bench.step()
    assert bench.scheduler.num_displaced == 0
    assert (bench.state("low"), bench.state("urgent")) == ("running", "waiting")


def test_a_tenant_at_its_cap_displaces_its_own() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=8, tenant_cap=0.25)
    bench.add("cold", 4, adapter=A, tenant="another that waits")
    bench.add("normal", 4, max_tokens=200)
    bench.add("low", 4, max_tokens=200, priority=1)
    bench.step()
    bench.add("urgent", 4, max_tokens=200, priority=-1)
    assert counts(bench.step()) == {"normal": 1, "urgent": 4}
    assert bench.scheduler.num_displaced == 1


def test_blocks_are_taken_from_the_lowest_priority_rather_than_the_newest() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("low", 16, max_tokens=20, priority=1)
    bench.add("normal", 16, max_tokens=20)
    steps_until(bench, lambda: bench.scheduler.num_preemptions)
    assert (bench.state("low"), bench.state("normal")) == ("waiting", "running")
    bench.run()
    assert bench.finished == {"low": 20, "normal": 20}


def test_nobody_is_displaced_for_a_request_whose_adapter_finds_no_room() -> None:
    bench = SchedulerBench(num_blocks=400, max_num_seqs=1)
    bench.add("low", 4, max_tokens=9, priority=1)
    bench.step()
    bench.add("urgent", 4, adapter=A)
    for _ in range(3):
        bench.step()
    assert (bench.scheduler.num_displaced, bench.state("low")) == (0, "running")


def test_who_finds_no_blocks_keeps_no_adapter_on_the_device_while_it_waits() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.manager.resident.add(A)
    bench.add("runs", 16, max_tokens=20)
    bench.add("waits", 32, adapter=A)
    bench.step()
    assert bench.state("waits") == "waiting"
    assert bench.manager.leases == {}
    bench.run()
    assert set(bench.finished) == {"runs", "waits"}


def test_who_waits_for_blocks_has_waited_for_its_adapter_only_until_it_came() -> None:
    bench = SchedulerBench(num_blocks=10, step_seconds=1.0)
    bench.add("runs", 16, max_tokens=9)
    waits = bench.add("waits", 32, adapter=A)
    bench.step()
    bench.manager.resident.add(A)
    steps_until(bench, lambda: bench.state("waits") != "waiting")
    assert waits.adapter_wait_seconds == 1.0


def test_what_one_request_lacked_holds_up_no_other() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("runs", 16, max_tokens=9)
    large = bench.add("large", 32)
    bench.step()
    bench.scheduler.finish(large)
    bench.add("small", 8)
    assert "small" in counts(bench.step())


def test_who_waits_for_blocks_runs_once_exactly_as_many_are_free() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("ends", 16, max_tokens=2)
    bench.add("runs", 4, max_tokens=3)
    bench.step()
    bench.add("waits", 32)
    assert counts(bench.step()) == {"ends": 1, "runs": 1}
    assert bench.kv.num_free(0) == 8
    assert counts(bench.step()) == {"runs": 1, "waits": 31}


def test_blocks_promised_to_a_prompt_are_not_given_to_a_tenant_that_was_served_less() -> None:
    bench = SchedulerBench(num_blocks=10, budget=8)
    bench.add("long", 32, tenant="a")
    bench.step()
    bench.add("other", 12, tenant="b")
    assert counts(bench.step()) == {"long": 8}
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_blocks_are_short_until_the_one_that_lacked_them_runs() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("runs", 16, max_tokens=9)
    bench.add("waits", 32, max_tokens=3)
    bench.step()
    assert bench.scheduler.is_short_of_kv
    steps_until(bench, lambda: bench.state("waits") == "running")
    assert not bench.scheduler.is_short_of_kv


@pytest.mark.parametrize("num_swap_slots", [0, 20])
def test_every_time_that_a_request_gives_way_is_counted(num_swap_slots: int) -> None:
    bench = SchedulerBench(num_blocks=10, num_swap_slots=num_swap_slots)
    scheduler = bench.scheduler
    assert (scheduler.num_preemptions, scheduler.num_swaps, scheduler.num_reclaims) == (0, 0, 0)
    requests = [bench.add(f"r{index}", 9, max_tokens=20) for index in range(4)]
    swaps = 0
    while scheduler.has_requests:
        batch = bench.step()
        assert batch
        swaps += sum(isinstance(operation, SwapOut) for operation in batch.operations)
    assert scheduler.num_preemptions == sum(request.num_preemptions for request in requests) > 1
    assert scheduler.num_swaps == swaps == (scheduler.num_preemptions if num_swap_slots else 0)


def test_what_swapping_takes_is_no_part_of_what_a_steps_tokens_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SchedulerBench(num_swap_slots=10, kv_block_bytes=(100,))
    observed: list[float] = []
    monkeypatch.setattr(bench.costs, "observe", lambda shape, seconds: observed.append(seconds))
    swap = SwapOut(0, (1, 2), (0, 1))
    bench.scheduler.observe(ScheduledBatch((), (swap,), StepShape(8, 1, 4)), 1.0, swap_seconds=0.25)
    assert observed == [0.75]


def test_a_swap_moves_what_windows_have_left_there_and_back() -> None:
    swaps = SwapCosts(StepCosts(swap_bytes_per_second=100.0), (10, 50))
    seq = SequenceBlocks(
        tables=[block_table([1, 2, 3]), block_table([NULL_BLOCK, NULL_BLOCK, 4])],
        num_freed=[0, 2],
        host_slots=[{}, {}],
    )
    assert swaps.round_trip_seconds(seq) == 2 * (3 * 10 + 50) / 100


def test_nothing_is_learned_from_steps_without_swaps_or_without_their_time() -> None:
    costs = StepCosts(swap_bytes_per_second=1.0)
    swaps, swap = SwapCosts(costs, (10,)), SwapOut(0, (4, 5), (0, 1))
    swaps.observe([], 2.0)
    swaps.observe([CopyBlock(0, 1, 2)], 2.0)
    swaps.observe([swap], 0.0)
    SwapCosts(costs, ()).observe([swap], 2.0)
    assert costs.swap_seconds(100) == 100.0


def test_swaps_are_learned_from_in_both_directions() -> None:
    for operation in (SwapIn(1, (0, 1), (4, 5)), SwapOut(1, (4, 5), (0, 1))):
        costs = StepCosts(swap_bytes_per_second=1.0)
        SwapCosts(costs, (10, 50)).observe([operation], 2.0)
        assert costs.swap_seconds(100) == pytest.approx(2.0)
