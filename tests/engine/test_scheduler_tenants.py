"""How the scheduler divides the device among tenants, and which requests it refuses."""

from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import Overloaded, PromptTooLong, TenantQueueFull
from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from loraplex.engine.scheduling.batch import Step
from loraplex.engine.scheduling.running import MAX_PREEMPTIONS
from support.scheduling import BLOCK, SchedulerBench, counts, steps_until

# --- tenants ------------------------------------------------------------------------------------


def test_the_tenant_served_least_is_admitted_first() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    for index in range(4):
        bench.add(f"flood{index}", 8, max_tokens=4, tenant="flooder")
    bench.step()
    bench.add("victim", 8, tenant="victim")
    bench.run()
    assert list(bench.finished)[:2] == ["flood0", "victim"]


def test_a_short_prompt_is_not_held_up_by_another_tenants_long_one() -> None:
    bench = SchedulerBench(num_blocks=200, budget=16)
    bench.add("long", 400, tenant="flooder")
    bench.step()
    bench.add("short", 8, tenant="victim")
    assert "short" in counts(bench.step())
    bench.run()
    assert list(bench.finished) == ["short", "long"]


def test_what_an_adapter_generates_counts_against_its_requests_that_wait() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    busy, idle = (AdapterKey("acme", f"sha256:{name}") for name in "bi")
    bench.manager.resident.update((busy, idle))
    bench.add("runs", 4, max_tokens=8, adapter=busy)
    bench.step()
    bench.add("same", 4, adapter=busy)
    bench.add("other", 4, adapter=idle)
    bench.run()
    assert list(bench.finished) == ["runs", "other", "same"]


def test_the_blocks_that_a_tenant_holds_are_counted_anew_in_each_step() -> None:
    bench = SchedulerBench()
    request = bench.add("grows", 4, max_tokens=30)
    running = bench.scheduler._running
    shares = set()
    for _ in range(20):
        bench.step()
        assert running.kv_share("acme") == bench.kv.share(request.kv)
        shares.add(running.kv_share("acme"))
    assert len(shares) > 4


def test_the_blocks_that_a_cache_is_compacted_to_count_before_it_is() -> None:
    bench = SchedulerBench(num_blocks=41)
    policy = KvPolicy(EvictionMethod.SNAPKV, 33)
    request = bench.add("compacted", 40, max_tokens=8, kv_policy=policy)
    running, num_targets = bench.scheduler._running, -(-33 // BLOCK)
    held = []
    while "compacted" not in bench.finished:
        bench.step()
        own = bench.kv.share(request.kv)
        later = running.kv_share("acme") - own
        is_ahead = bool(own) and not request.kv.num_evicted
        assert later == pytest.approx(num_targets / bench.kv.num_usable(0) * is_ahead)
        held.append(is_ahead)
    assert held[0]
    assert not held[-2]


def test_a_request_whose_compaction_does_not_fit_is_refused_with_the_reason() -> None:
    bench = SchedulerBench(num_blocks=11)
    policy = KvPolicy(EvictionMethod.SNAPKV, 33)
    with pytest.raises(PromptTooLong, match="beside the 33 tokens that kv_policy keeps, exceed 44"):
        bench.add("compacted", 36, max_tokens=4, kv_policy=policy)
    bench.add("whole", 36, max_tokens=4)


def test_whoever_has_given_way_is_not_the_next_victim_while_another_holds_more() -> None:
    bench = SchedulerBench(budget=100)
    bench.add("large", 24, max_tokens=9, tenant="greedy")
    middle = bench.add("middle", 28, max_tokens=9, tenant="modest")
    small = bench.add("small", 8, max_tokens=9, tenant="greedy")
    bench.step()
    running = bench.scheduler._running
    assert running.victim(running.kv_share) is small
    bench.scheduler._preemption.preempt(
        small, Step(budget=1, block_size=1, max_read_rows=0, is_ahead=False)
    )
    assert running.victim(running.kv_share) is middle


def test_service_follows_the_weights() -> None:
    bench = SchedulerBench(num_blocks=500, max_num_seqs=4, budget=64)
    for index in range(60):
        bench.add(f"h{index}", 8, max_tokens=8, tenant="heavy", weight=3.0)
        bench.add(f"l{index}", 8, max_tokens=8, tenant="light", weight=1.0)
    while len(bench.finished) < 60:
        bench.step()
    heavy = sum(name.startswith("h") for name in bench.finished)
    assert 42 <= heavy <= 48


def test_caps_bind_only_while_another_tenant_waits() -> None:
    bench = SchedulerBench(num_blocks=200, max_num_seqs=10, budget=200, tenant_cap=0.6)
    for index in range(12):
        bench.add(f"a{index}", 4, max_tokens=30, tenant="alone")
    bench.step()
    assert bench.scheduler.num_running == 10
    capped = SchedulerBench(num_blocks=200, max_num_seqs=10, budget=200, tenant_cap=0.6)
    for index in range(12):
        capped.add(f"a{index}", 4, max_tokens=30, tenant="a")
    capped.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    capped.step()
    assert capped.scheduler.num_running == 6


def test_the_second_request_of_a_tenant_is_bounded_by_the_cap() -> None:
    bench = SchedulerBench(num_blocks=200, max_num_seqs=10, tenant_cap=0.1)
    for index in range(3):
        bench.add(f"a{index}", 4, max_tokens=9, tenant="a")
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    assert counts(bench.step()) == {"a0": 4}


def test_the_cap_counts_blocks_too() -> None:
    bench = SchedulerBench(num_blocks=20, budget=200, tenant_cap=0.6)
    for index in range(4):
        bench.add(f"a{index}", 16, max_tokens=2, tenant="a")
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    bench.step()
    assert bench.scheduler.num_running == 3


def test_the_cap_counts_blocks_that_were_found_in_the_prefix_cache() -> None:
    bench = SchedulerBench(num_blocks=20, budget=200, prefix_caching=True, tenant_cap=0.6)
    bench.add("first", list(range(17)), tenant="a")
    bench.run()
    for index in range(4):
        bench.add(f"a{index}", list(range(17)), max_tokens=2, tenant="a")
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    bench.step()
    assert bench.scheduler.num_running == 2


def capped_bench(num_adapters: int) -> tuple[SchedulerBench, list[AdapterKey]]:
    """Room for four adapters, of which a tenant may lease two; tenant `a` asks one request each of
    its resident adapters."""
    bench = SchedulerBench(num_blocks=200, budget=200, tenant_cap=0.5)
    bench.manager.capacity = 4
    adapters = [AdapterKey("a", f"sha256:{index}") for index in range(num_adapters)]
    bench.manager.resident.update(adapters)
    for index, adapter in enumerate(adapters):
        bench.add(f"a{index}", 4, max_tokens=9, adapter=adapter, tenant="a")
    return bench, adapters


def test_the_cap_counts_adapter_bytes_too() -> None:
    bench, adapters = capped_bench(4)
    bench.add("a4", 4, max_tokens=9, adapter=adapters[0], tenant="a")
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    batch = bench.step()
    assert set(counts(batch)) == {"a0", "a1", "a4"}


def test_an_adapter_beyond_the_cap_is_not_leased_while_its_request_waits() -> None:
    bench, _ = capped_bench(3)
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    for _ in range(3):
        assert set(counts(bench.step())) == {"a0", "a1"}
        assert bench.manager.leases.keys() == {"a0", "a1"}


def test_what_a_tenant_leases_already_it_may_use_beyond_its_cap() -> None:
    bench, adapters = capped_bench(3)
    bench.step()
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    bench.add("a3", 4, max_tokens=9, adapter=adapters[0], tenant="a")
    assert "a3" in counts(bench.step())


def test_a_tenant_at_its_cap_holds_up_no_other() -> None:
    bench = SchedulerBench(num_blocks=200, max_num_seqs=4, budget=200, tenant_cap=0.5)
    for index in range(4):
        bench.add(f"a{index}", 4, max_tokens=9, tenant="a", weight=9.0)
    bench.add("other", 200, max_tokens=9, tenant="b")
    bench.add("next", 4, max_tokens=9, tenant="b")
    for _ in range(2):
        bench.step()
    assert bench.scheduler.num_running == 4
    assert bench.state("other") == bench.state("next") == "running"


def test_one_request_of_a_tenant_runs_whatever_its_cap() -> None:
    bench = SchedulerBench(num_blocks=20, budget=200, tenant_cap=0.1)
    bench.add("big", 60, max_tokens=2, tenant="a")
    bench.add("cold", 4, adapter=AdapterKey("b", "sha256:bb"), tenant="b")
    assert "big" in counts(bench.step())


def test_a_full_batch_makes_room_for_a_tenant_below_its_share() -> None:
    bench = SchedulerBench(num_blocks=200, max_num_seqs=4, step_seconds=0.01)
    for index in range(4):
        bench.add(f"a{index}", 4, max_tokens=200, tenant="greedy")
    bench.step()
    for index in range(3):
        bench.add(f"b{index}", 4, max_tokens=200, tenant="late")
    assert steps_until(bench, lambda: bench.state("b0") == "running") <= 5
    assert bench.scheduler.num_reclaims == 1
    for _ in range(40):
        bench.step()
    # To an equal share, and not beyond.
    running = [name for name in ("a0", "a1", "b0", "b1") if bench.state(name) == "running"]
    assert running == ["a0", "a1", "b0", "b1"]
    assert bench.scheduler.num_reclaims == 2


def test_a_tenant_does_not_inherit_how_long_another_has_waited() -> None:
    def full_batch() -> SchedulerBench:
        bench = SchedulerBench(num_blocks=200, max_num_seqs=4)
        for index in range(4):
            bench.add(f"a{index}", 4, max_tokens=200, tenant="greedy")
        bench.step()
        return bench

    def steps_until_late_runs(bench: SchedulerBench) -> int:
        bench.add("late", 4, max_tokens=200, tenant="late")
        return steps_until(bench, lambda: bench.state("late") == "running")

    num_steps = steps_until_late_runs(full_batch())
    bench = full_batch()
    gone = bench.add("gone", 4, max_tokens=200, tenant="gone")
    for _ in range(num_steps - 1):
        bench.step()
    assert bench.state("gone") == "waiting"
    bench.scheduler.finish(gone)
    assert steps_until_late_runs(bench) == num_steps


def test_blocks_are_taken_back_from_who_holds_more_than_its_share() -> None:
    bench = SchedulerBench(num_blocks=40, budget=200, step_seconds=0.05)
    for index in range(5):
        bench.add(f"a{index}", 24, max_tokens=8, tenant="greedy")
    bench.step()
    bench.add("victim", 40, max_tokens=2, tenant="late")
    assert steps_until(bench, lambda: bench.state("victim") == "running") <= 3
    bench.run()
    assert bench.finished["victim"] == 2
    bench.assert_empty()


def test_a_long_request_over_its_share_still_gets_to_its_end() -> None:
    """Whole of the pool, while others come all the time."""
    bench = SchedulerBench(num_blocks=20, max_num_seqs=4, budget=64, step_seconds=0.05)
    bench.add("long", 40, max_tokens=36, tenant="long")
    for index in range(400):
        bench.add(f"s{index}", 8, max_tokens=8, tenant="stream")
        bench.step()
        if "long" in bench.finished:
            return
    raise AssertionError("the long request starved")


def test_a_tenants_last_request_that_has_given_way_often_does_so_only_where_all_have() -> None:
    bench = SchedulerBench(num_blocks=20, budget=100)
    long = bench.add("long", 48, max_tokens=30, tenant="long")
    bench.add("short", 16, max_tokens=40, tenant="other")
    long.num_preemptions = MAX_PREEMPTIONS
    steps_until(bench, lambda: bench.scheduler.num_preemptions)
    assert (bench.state("long"), bench.state("short")) == ("running", "waiting")


# --- refusals and deadlines ---------------------------------------------------------------------


def test_queues_are_bounded_per_tenant_and_over_all() -> None:
    bench = SchedulerBench(max_queued=5, max_queued_per_tenant=3)
    for index in range(3):
        bench.add(f"a{index}", 4, tenant="a")
    with pytest.raises(TenantQueueFull) as refused:
        bench.add("a3", 4, tenant="a")
    assert refused.value.retry_after_seconds is not None
    assert refused.value.retry_after_seconds >= 1
    bench.add("b0", 4, tenant="b")
    bench.add("b1", 4, tenant="b")
    with pytest.raises(Overloaded):
        bench.add("c0", 4, tenant="c")
    bench.run()
    assert len(bench.finished) == 5


def test_what_is_held_counts_in_its_tenants_queue_and_runs_once_it_is_released() -> None:
    bench = SchedulerBench(max_queued_per_tenant=2)
    held, gone = (bench.add(name, 4, is_held=True) for name in ("held", "gone"))
    with pytest.raises(TenantQueueFull):
        bench.add("more", 4)
    assert bench.scheduler.num_waiting == 2
    bench.scheduler.finish(gone)
    bench.add("more", 4)
    assert set(counts(bench.step())) == {"more"}
    bench.scheduler.release(held)
    assert set(counts(bench.step())) == {"held"}
    bench.assert_empty()


def test_a_deadline_ends_a_request_whether_it_waits_or_runs() -> None:
    bench = SchedulerBench(max_num_seqs=1, step_seconds=1.0)
    bench.add("running", 4, max_tokens=50, deadline=5.0)
    bench.add("waiting", 4, max_tokens=50, deadline=3.0)
    bench.add("patient", 4, max_tokens=2)
    bench.run()
    assert {name: error.code for name, error in bench.failed.items()} == {
        "running": "deadline_exceeded",
        "waiting": "deadline_exceeded",
    }
    assert bench.finished == {"patient": 2}
    bench.assert_empty()


def test_a_deadline_that_the_wait_alone_passes_is_refused_at_once() -> None:
    bench = SchedulerBench(max_num_seqs=2, budget=32, step_seconds=0.1)
    for index in range(20):
        bench.add(f"a{index}", 16, max_tokens=10)
    for _ in range(40):
        bench.step()
    with pytest.raises(Overloaded) as refused:
        bench.add("hasty", 8, deadline=0.2)
    assert refused.value.retry_after_seconds is not None
    assert refused.value.retry_after_seconds > 0.2
    bench.add("patient", 8, deadline=100.0)
    # Another tenant does not wait behind all of these.
    bench.add("other", 8, deadline=3.0, tenant="other")


def test_a_tenant_at_its_cap_takes_no_room_from_others() -> None:
    bench = SchedulerBench(num_blocks=200, max_num_seqs=10, tenant_cap=0.4, step_seconds=0.1)
    for index in range(4):
        bench.add(f"heavy{index}", 4, 40, tenant="acme", weight=9.0)
    for index in range(6):
        bench.add(f"light{index}", 4, 40, tenant="globex")
        bench.step()
    bench.add("heavy4", 4, 40, tenant="acme", weight=9.0)
    for _ in range(20):
        bench.step()
    assert bench.state("heavy4") == "waiting"
    assert bench.scheduler.num_preemptions == 0


def test_outputs_are_waited_for_where_blocks_are_short_too() -> None:
    bench = SchedulerBench(num_blocks=10, step_seconds=0.1)
    for index in range(20):
        bench.add(f"a{index}", 16, max_tokens=10)
    for _ in range(40):
        bench.step()
    assert bench.scheduler.is_short_of_kv
    assert not bench.scheduler.is_full
    with pytest.raises(Overloaded):
        bench.add("hasty", 8, deadline=5.0)
