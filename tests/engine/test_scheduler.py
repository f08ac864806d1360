"""The scheduler's decisions, without a model: a fake device computes whatever was scheduled."""

from __future__ import annotations

import random

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Failure, Tier
from loraplex.engine.errors import DeadlineExceeded, Overloaded, PromptTooLong
from loraplex.engine.kv.layout import CopyBlock, SwapIn, SwapOut
from loraplex.engine.request import Request
from loraplex.engine.scheduling.adapter_leases import EXPECT_INTERVAL_SECONDS
from loraplex.engine.scheduling.batch import ScheduledBatch
from loraplex.engine.scheduling.step_costs import StepShape
from support.block_tables import tables_of
from support.scheduling import BLOCK, SchedulerBench, counts, steps_until

A = AdapterKey("acme", "sha256:aa")


# --- one tenant ---------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks_and_decodes_ride_along() -> None:
    bench = SchedulerBench(budget=10)
    bench.add("short", 3, max_tokens=5)
    assert counts(bench.step()) == {"short": 3}
    bench.add("long", 25)
    assert counts(bench.step()) == {"short": 1, "long": 9}
    assert counts(bench.step()) == {"short": 1, "long": 9}
    assert counts(bench.step()) == {"short": 1, "long": 7}


def test_the_last_two_tokens_of_a_prompt_are_computed_in_one_step() -> None:
    bench = SchedulerBench(budget=10)
    bench.add("only", 12)
    assert counts(bench.step()) == {"only": 10}
    assert counts(bench.step()) == {"only": 2}
    assert bench.finished == {"only": 1}


def test_requests_of_a_tenant_run_in_the_order_they_came() -> None:
    bench = SchedulerBench(budget=8, max_num_seqs=2)
    for name in "abc":
        bench.add(name, 4, max_tokens=2)
    assert list(counts(bench.step())) == ["a", "b"]
    assert list(counts(bench.step())) == ["a", "b"]
    assert list(counts(bench.step())) == ["c"]


def test_the_lower_priority_number_runs_first_within_its_tenant() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    bench.add("late", 4, priority=1)
    bench.add("first", 4, priority=-1)
    bench.add("second", 4)
    bench.run()
    assert list(bench.finished) == ["first", "second", "late"]


def test_a_request_that_fills_the_whole_pool_runs_alone() -> None:
    bench = SchedulerBench(num_blocks=8, budget=5)
    bench.add("whole", 20, max_tokens=12)
    bench.add("other", 20, max_tokens=12)
    bench.run()
    assert bench.finished == {"whole": 12, "other": 12}


@pytest.mark.parametrize(("prompt", "max_tokens"), [(257, 1), (1, 256), (200, 57)])
def test_what_could_not_even_run_alone_is_refused_at_once(prompt: int, max_tokens: int) -> None:
    bench = SchedulerBench(num_blocks=64)
    with pytest.raises(PromptTooLong):
        bench.add("huge", prompt, max_tokens)
    bench.assert_empty()
    bench.add("fits", 255, 1)


def test_a_request_may_be_as_long_as_the_model_allows() -> None:
    bench = SchedulerBench(num_blocks=3000)
    longest = bench.limits.max_model_len
    bench.add("whole", longest - 1, 1)
    with pytest.raises(PromptTooLong, match=f"exceed {longest} tokens"):
        bench.add("longer", longest, 1)


def test_a_smaller_request_does_not_take_the_blocks_an_earlier_one_waits_for() -> None:
    bench = SchedulerBench(num_blocks=8, budget=100)
    bench.add("running", 20, max_tokens=2)
    bench.step()
    bench.add("big", 20)
    bench.add("small", 4)
    assert list(counts(bench.step())) == ["running"]
    assert list(counts(bench.step())) == ["big", "small"]


def test_blocks_promised_to_a_running_prompt_are_given_to_no_one_else() -> None:
    bench = SchedulerBench(num_blocks=10, budget=8)
    bench.add("long", 32)
    bench.step()
    bench.add("other", 12)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert list(bench.finished) == ["long", "other"]


def test_a_shared_beginning_is_computed_once() -> None:
    bench = SchedulerBench(prefix_caching=True)
    prompt = list(range(22))
    bench.add("first", prompt)
    bench.run()
    bench.add("second", [*prompt[:17], 99, 98])
    assert counts(bench.step()) == {"second": 19 - 16}
    assert bench.started["second"].num_cached_tokens == 16


def test_a_prompt_that_goes_on_one_token_behind_a_cached_beginning_computes_that_token_only() -> (
    None
):
    bench = SchedulerBench(prefix_caching=True)
    prompt = list(range(17))
    for name in ("first", "second"):
        request = bench.add(name, prompt)
        bench.run()
    assert request.num_cached_tokens == 16


def test_positions_that_are_still_to_be_read_are_not_taken_from_the_cache() -> None:
    bench = SchedulerBench(prefix_caching=True)
    bench.add("first", list(range(20)))
    bench.run()
    request = bench.add("second", list(range(20)))
    request.unread = range(7, 19)
    bench.step()
    assert request.num_cached_tokens == 4


# --- adapters -----------------------------------------------------------------------------------


def test_a_request_whose_adapter_is_missing_is_passed_by_and_served_when_it_comes() -> None:
    bench = SchedulerBench()
    bench.add("cold", 4, adapter=A)
    bench.add("base", 4)
    assert bench.manager.requested == [A]
    assert list(counts(bench.step())) == ["base"]
    assert bench.step() is None
    bench.manager.resident.add(A)
    assert list(counts(bench.step())) == ["cold"]
    bench.assert_empty()


def test_the_start_tells_how_long_the_adapter_took() -> None:
    bench = SchedulerBench()
    bench.add("cold", 4, adapter=A, tier=Tier.STORE)
    bench.now = 0.5
    bench.step()
    bench.now = 1.5
    bench.manager.resident.add(A)
    bench.add("warm", 4, adapter=A, tier=Tier.DEVICE)
    bench.now = 2.0
    cold, warm = bench.scheduler.schedule().started
    # On arrival only the fetcher knew that the block lay on the local disk.
    assert (cold.adapter_tier, cold.queue_seconds, cold.adapter_wait_seconds) == ("disk", 2.0, 1.5)
    assert (warm.adapter_tier, warm.queue_seconds, warm.adapter_wait_seconds) == ("device", 0.5, 0)


def test_the_manager_is_told_which_adapters_are_next_while_requests_wait() -> None:
    bench = SchedulerBench(max_num_seqs=1, step_seconds=EXPECT_INTERVAL_SECONDS)
    bench.manager.resident.add(A)
    bench.add("running", 4, max_tokens=20, adapter=A)
    bench.step()
    names = [AdapterKey("acme", f"sha256:{index}") for index in range(3)]
    for name in names:
        bench.add(f"waits for {name.digest}", 4, adapter=name)
    assert bench.manager.requested[-len(names) :] == names
    bench.step()
    bench.step()
    assert bench.manager.expected == names
    for request in bench.scheduler.requests():
        assert bench.manager.expected == names
        bench.scheduler.finish(request)
    assert bench.manager.expected == [], "though perhaps no step comes for a long time"


def test_the_manager_is_told_which_adapters_are_next_at_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SchedulerBench(step_seconds=0.3 * EXPECT_INTERVAL_SECONDS)
    times: list[float] = []
    monkeypatch.setattr(bench.manager, "expect", lambda _: times.append(bench.now))
    bench.add("base", 4, max_tokens=20)
    for _ in range(9):
        bench.step()
    assert times == pytest.approx([1.2 * EXPECT_INTERVAL_SECONDS * n for n in range(3)])


def test_a_failed_adapter_ends_its_requests_only() -> None:
    bench = SchedulerBench()
    bench.add("doomed", 4, adapter=A)
    bench.add("base", 4)
    bench.manager.failures[A] = Failure("object_not_found", "gone")
    bench.run()
    assert bench.failed["doomed"].code == "adapter_load_failed"
    assert bench.finished == {"base": 1}
    bench.assert_empty()


# --- deadlines and the backlog --------------------------------------------------------------------


def test_a_deadline_that_has_come_is_refused_and_one_that_comes_ends_its_request() -> None:
    bench = SchedulerBench()
    with pytest.raises(DeadlineExceeded):
        bench.add("too late", 4, deadline=0.0)
    bench.add("limited", 4, max_tokens=9, deadline=1.0)
    bench.now = 0.99
    assert counts(bench.step()) == {"limited": 4}
    bench.now = 1.0
    assert bench.step() is None
    assert bench.failed["limited"].code == "deadline_exceeded"
    bench.assert_empty()


def test_the_deadline_of_a_request_that_has_ended_is_forgotten() -> None:
    bench = SchedulerBench(step_seconds=1.0)
    bench.add("brief", 4, deadline=3.0)
    bench.add("long", 4, max_tokens=9)
    bench.run()
    assert (bench.finished, bench.failed) == ({"brief": 1, "long": 9}, {})


@pytest.mark.parametrize("is_started", [False, True])
def test_only_prompts_that_wait_are_waited_for(is_started: bool) -> None:
    bench = SchedulerBench(budget=256)
    for size in range(1, 200):
        bench.costs.observe(StepShape(size, 0, 0), 1e-3 * size)
    request = bench.add("ahead", 200)
    with pytest.raises(Overloaded):
        bench.add("hasty", 4, deadline=0.1)
    if is_started:
        bench.step()
    else:
        bench.scheduler.finish(request)
    bench.add("hasty", 4, deadline=0.1)


# --- preemption ---------------------------------------------------------------------------------


def test_when_blocks_run_out_the_newest_is_computed_again_and_still_finishes() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("old", 16, max_tokens=20)
    new = bench.add("new", 16, max_tokens=20)
    steps_until(bench, lambda: bench.scheduler.num_preemptions)
    assert (bench.state("old"), bench.state("new")) == ("running", "waiting")
    assert tables_of(new.kv) == [[]]
    assert new.num_computed_tokens == 0
    assert new.num_generated_tokens > 0
    bench.run()
    assert bench.finished == {"old": 20, "new": 20}
    assert bench.scheduler.num_swaps == 0
    bench.assert_empty()


@pytest.mark.parametrize("num_swap_slots", [0, 8])
def test_the_others_decode_in_the_step_in_which_one_among_them_gives_way(
    num_swap_slots: int,
) -> None:
    bench = SchedulerBench(num_blocks=8, num_swap_slots=num_swap_slots)
    for name, prompt in (("first", 4), ("large", 24), ("last", 3)):
        bench.add(name, prompt, max_tokens=8, tenant=name)
    assert counts(bench.step()) == {"first": 4, "large": 24, "last": 3}
    assert counts(bench.step()) == {"first": 1, "last": 1}
    assert bench.state("large") == "waiting"


def test_a_victim_does_not_keep_its_adapter_on_the_device_while_it_waits() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.manager.resident.add(A)
    bench.add("old", 16, max_tokens=20)
    bench.add("new", 16, max_tokens=20, adapter=A)
    steps_until(bench, lambda: bench.scheduler.num_preemptions)
    assert bench.state("new") == "waiting"
    assert bench.manager.leases == {}
    bench.run()
    assert bench.finished == {"old": 20, "new": 20}


def test_a_step_that_takes_blocks_back_admits_nobody_into_them() -> None:
    bench = SchedulerBench(num_blocks=10)
    bench.add("old", 16, max_tokens=20)
    bench.add("new", 16, max_tokens=20)
    steps_until(bench, lambda: not bench.kv.num_free(0))
    for _ in range(BLOCK - 1):
        bench.step()
    bench.add("late", 4, tenant="other")
    assert counts(bench.step()) == {"old": 1}
    assert bench.state("new") == "waiting"
    assert "late" in counts(bench.step())


def test_where_the_host_has_room_the_victim_is_swapped_and_computes_nothing_again() -> None:
    bench = SchedulerBench(num_blocks=10, num_swap_slots=10)
    requests = [bench.add(name, 16, max_tokens=20) for name in ("old", "new")]
    log: list[object] = []
    computed = 0
    while bench.scheduler.has_requests:
        batch = bench.step()
        assert batch
        log += batch.operations
        computed += batch.num_tokens
    assert bench.scheduler.num_swaps == bench.scheduler.num_preemptions > 0
    assert computed == sum(len(request.token_ids) - 1 for request in requests)
    kinds = [type(operation) for operation in log if isinstance(operation, SwapIn | SwapOut)]
    assert kinds == [SwapOut, SwapIn] * bench.scheduler.num_swaps
    bench.assert_empty()


def test_the_cost_of_a_swap_is_learned_from_the_steps_that_swap() -> None:
    bench = SchedulerBench(num_swap_slots=10, kv_block_bytes=(100,))
    shape = StepShape(0, 1, 4)
    before = bench.costs.swap_seconds(200)
    bench.scheduler.observe(ScheduledBatch((), (), shape), 1.0, swap_seconds=0.5)
    assert bench.costs.swap_seconds(200) == before
    swap = SwapOut(0, (1, 2), (0, 1))
    bench.scheduler.observe(ScheduledBatch((), (swap,), shape), 1.0, swap_seconds=0.5)
    assert bench.costs.swap_seconds(200) == pytest.approx(0.5)


def test_a_swap_that_costs_more_than_it_saves_is_not_made() -> None:
    bench = SchedulerBench(num_blocks=10, num_swap_slots=10, kv_block_bytes=(1,))
    bench.costs.observe_swap(1, 1.0)
    for size in range(1, 20):
        bench.costs.observe(StepShape(size, 0, 0), 1e-6 * size)
    bench.add("old", 16, max_tokens=20)
    bench.add("new", 16, max_tokens=20)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.num_swaps == 0


def test_the_victim_is_of_the_tenant_that_holds_most_for_its_weight() -> None:
    bench = SchedulerBench(num_blocks=20, budget=100)
    bench.add("small", 4, max_tokens=60, tenant="modest")
    bench.add("first", 24, max_tokens=20, tenant="greedy")
    bench.add("last", 24, max_tokens=20, tenant="greedy")
    steps_until(bench, lambda: bench.scheduler.num_preemptions)
    assert bench.state("last") == "waiting"
    assert bench.state("small") == bench.state("first") == "running"


def test_every_token_of_a_prompt_is_charged_however_it_is_cut() -> None:
    for length in range(8, 24):
        bench = SchedulerBench(budget=8)
        bench.add("only", length)
        bench.run()
        counters = bench.scheduler.counters
        expected = length * counters.input_weight + counters.output_weight
        assert counters.counter("acme") == expected


def test_what_is_computed_again_is_not_charged() -> None:
    bench = SchedulerBench(num_blocks=10)
    requests = [bench.add(name, 16, max_tokens=20) for name in ("old", "new")]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    counters = bench.scheduler.counters
    served = counters.input_weight * 32 + counters.output_weight * 40
    assert counters.counter("acme") == served
    assert sum(request.num_generated_tokens for request in requests) == 40


# --- target inter-token latency -------------------------------------------------------------------


def test_a_target_bounds_the_prompt_tokens_that_share_a_step_with_decodes() -> None:
    bench = SchedulerBench(num_blocks=400, budget=256, target_itl_seconds=0.02)
    for size in range(1, 200):
        bench.costs.observe(StepShape(size, 4, 100), 0.01 + size * 1e-3)
    bench.add("decoding", 4, max_tokens=300)
    bench.step()
    bench.add("prompt", 600)
    chunk = counts(bench.step())["prompt"]
    assert BLOCK < chunk <= 20
    bench.scheduler.finish(bench.scheduler.get("decoding"))  # type: ignore[arg-type]
    assert counts(bench.step()) == {"prompt": 256}


def test_an_impossible_target_still_lets_prompts_advance() -> None:
    bench = SchedulerBench(budget=64, target_itl_seconds=1e-9)
    for size in range(1, 200):
        bench.costs.observe(StepShape(size, 4, 100), 0.01 + size * 1e-3)
    bench.add("decoding", 4, max_tokens=30)
    bench.step()
    bench.add("prompt", 30)
    assert counts(bench.step())["prompt"] == BLOCK
    bench.run()
    assert bench.finished == {"decoding": 30, "prompt": 1}


# --- several answers to one prompt ----------------------------------------------------------------


@pytest.mark.parametrize("prompt", [19, 20, 21])
def test_a_group_computes_its_prompt_once_and_copies_what_it_writes(prompt: int) -> None:
    bench = SchedulerBench(budget=64)
    for index in range(4):
        bench.add(f"g{index}", list(range(prompt)), max_tokens=6, group="g")
    assert counts(bench.step()) == {"g0": prompt}
    batch = bench.step()
    assert counts(batch) == {"g0": 1, "g1": 1, "g2": 1, "g3": 1}
    assert batch is not None
    copies = [entry for entry in batch.operations if isinstance(entry, CopyBlock)]
    is_split = (prompt - 1) % BLOCK != 0
    assert len(copies) == (3 if is_split else 0)
    bench.run()
    assert bench.finished == dict.fromkeys(("g0", "g1", "g2", "g3"), 6)
    assert bench.scheduler.num_forks == 3
    bench.assert_empty()


def test_a_group_goes_on_when_who_computes_its_prompt_is_aborted() -> None:
    bench = SchedulerBench(budget=8)
    leader = bench.add("g0", list(range(30)), max_tokens=3, group="g")
    bench.add("g1", list(range(30)), max_tokens=3, group="g")
    bench.add("g2", list(range(30)), max_tokens=3, group="g")
    bench.step()
    assert bench.state("g1") == "waiting"
    bench.scheduler.finish(leader)
    bench.run()
    assert bench.finished == {"g1": 3, "g2": 3}
    assert bench.scheduler.num_forks == 1
    bench.assert_empty()


def test_groups_of_other_tenants_or_with_another_prompt_share_nothing() -> None:
    bench = SchedulerBench(budget=200)
    bench.add("a", list(range(20)), max_tokens=4, group="g", tenant="a")
    bench.add("b", list(range(20)), max_tokens=4, group="g", tenant="b")
    bench.add("c", list(range(1, 21)), max_tokens=4, group="g", tenant="a")
    assert counts(bench.step()) == {"a": 20, "b": 20, "c": 20}
    bench.run()
    assert bench.scheduler.num_forks == 0


# --- ends in every state --------------------------------------------------------------------------


def test_an_end_in_any_state_gives_everything_back_and_a_second_one_does_nothing() -> None:
    bench = SchedulerBench(num_blocks=10, num_swap_slots=20, budget=10, max_num_seqs=3)
    bench.manager.resident.add(A)
    pair = [
        bench.add("decoding", 16, max_tokens=20, adapter=A),
        bench.add("swapped", 16, max_tokens=20),
    ]
    steps_until(bench, lambda: bench.scheduler.num_swaps)
    assert pair[1].kv.is_swapped
    others = [
        bench.add("absent", 4, adapter=AdapterKey("acme", "sha256:bb")),
        bench.add("queued", 36),
        bench.add("group0", 4, group="g"),
        bench.add("group1", 4, group="g"),
        bench.add("limited", 4, deadline=10.0),
    ]
    for request in [*pair, *others]:
        bench.scheduler.finish(request)
        bench.scheduler.finish(request)
        bench.kv.check_integrity(entry.kv for entry in bench.scheduler.requests())
    bench.assert_empty()
    assert bench.step() is None
    assert not bench.scheduler.counters.is_active("acme")


def test_an_end_while_prefilling_gives_everything_back() -> None:
    bench = SchedulerBench(budget=6)
    bench.manager.resident.add(A)
    prefilling = bench.add("prefilling", 20, adapter=A)
    bench.step()
    bench.scheduler.finish(prefilling)
    bench.assert_empty()


# --- whatever happens -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))]
)
def test_every_request_finishes_and_nothing_leaks_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)

    def maybe(probability: float) -> bool:
        return rng.random() < probability

    bench = SchedulerBench(
        num_blocks=rng.randint(6, 30),
        budget=rng.randint(9, 30),
        max_num_seqs=rng.randint(1, 8),
        prefix_caching=maybe(0.7),
        num_swap_slots=rng.choice([0, 5, 40]),
        window=rng.choice([None, 6, 20]),
        tenant_cap=rng.choice([0.3, 0.6, 1.0]),
        step_seconds=0.01,
    )
    tenants = ["a", "b", "c"]
    adapters = [AdapterKey(tenant, f"sha256:{i}") for tenant in tenants for i in range(2)]
    capacity = bench.kv.num_usable(0) * BLOCK
    live: dict[str, Request] = {}
    aborted: set[str] = set()
    expected: dict[str, int] = {}

    for step in range(250):
        for adapter in adapters:
            if maybe(0.1):
                in_use = {lease.key for lease in bench.manager.leases.values()}
                if adapter in bench.manager.resident and adapter not in in_use:
                    bench.manager.resident.discard(adapter)
                else:
                    bench.manager.resident.add(adapter)
        if maybe(0.4):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, capacity - 1))]
            max_tokens = rng.randint(1, min(12, capacity - len(prompt)))
            tenant = rng.choice(tenants)
            line = rng.choice([None, *(key for key in adapters if key.tenant_id == tenant)])
            for member in range(rng.choice([1, 1, 3])):
                name = f"r{step}-{member}"
                live[name] = bench.add(
                    name,
                    prompt,
                    max_tokens,
                    line,
                    tenant=tenant,
                    weight=1.0 + tenants.index(tenant),
                    group=f"r{step}",
                    priority=rng.randrange(3),
                )
                expected[name] = max_tokens
        if maybe(0.1) and live:
            victim = rng.choice(list(live.values()))
            if bench.scheduler.get(victim.request_id):
                aborted.add(victim.request_id)
            bench.scheduler.finish(victim)
        bench.step()
    bench.manager.resident.update(adapters)
    bench.run()
    for name, max_tokens in expected.items():
        assert name in aborted or bench.finished[name] == max_tokens
    bench.assert_empty()


def test_a_waiting_request_never_stalls_an_idle_device() -> None:
    rng = random.Random(9)
    for _ in range(200):
        bench = SchedulerBench(
            num_blocks=rng.randint(4, 12), budget=rng.randint(9, 20), tenant_cap=0.5
        )
        capacity = bench.kv.num_usable(0) * BLOCK
        for index in range(rng.randint(1, 6)):
            prompt = rng.randint(1, capacity - 1)
            max_tokens = rng.randint(1, capacity - prompt)
            bench.add(f"r{index}", prompt, max_tokens, tenant=rng.choice("ab"))
        while bench.scheduler.has_requests:
            assert bench.step() is not None


def test_the_same_history_gives_the_same_schedule() -> None:
    def history() -> list[dict[str, int]]:
        rng = random.Random(4)
        bench = SchedulerBench(num_blocks=20, budget=16, prefix_caching=True, num_swap_slots=8)
        for index in range(60):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
            bench.add(f"r{index}", prompt, rng.randint(1, 9), tenant=rng.choice("abc"))
        batches: list[ScheduledBatch | None] = []
        while bench.scheduler.has_requests:
            batches.append(bench.step())
        return [counts(batch) for batch in batches]

    assert history() == history()
