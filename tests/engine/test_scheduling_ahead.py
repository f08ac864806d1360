"""The scheduler while a step that it scheduled is in flight."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from support.scheduling import BLOCK, SchedulerBench, counts

KEY = AdapterKey("acme", "sha256:1")


def schedule(bench: SchedulerBench) -> ScheduledBatch | None:
    batch, _, _ = bench.scheduler.schedule()
    bench.check(batch)
    return batch


def launch(bench: SchedulerBench) -> ScheduledBatch:
    """A step that is in flight from now on."""
    batch = schedule(bench)
    assert batch is not None
    bench.scheduler.note_launch(batch.sequences)
    return batch


def test_a_step_goes_on_from_tokens_that_are_not_known() -> None:
    bench = SchedulerBench(budget=16)
    request = bench.add("r", 20, max_tokens=5)
    steps = [launch(bench), launch(bench)]
    assert [counts(step) for step in steps] == [{"r": 16}, {"r": 4}]
    bench.process(steps[0])
    assert (len(request.token_ids), request.num_pending_tokens) == (20, 1)
    steps.append(launch(bench))
    (decode,) = steps[2].sequences
    assert (decode.start, decode.num_tokens, decode.samples) == (20, 1, True)
    assert (len(request.token_ids), request.num_pending_tokens) == (20, 2)
    bench.process(steps[1])
    assert (len(request.token_ids), request.num_pending_tokens) == (21, 1)


def test_outputs_are_charged_as_they_are_taken_and_those_of_background_requests_are_free() -> None:
    bench = SchedulerBench()
    weights = {"heavy": 4.0, "light": 0.5, "free": 1.0}
    heavy, light, free = (
        ScheduledSequence.of(
            bench.add(name, 4, 3, tenant=name, weight=weight, is_background=name == "free"), 4
        )
        for name, weight in weights.items()
    )
    counter = bench.scheduler.counters.counter
    before = {name: counter(name) for name in weights}
    bench.scheduler.take([(heavy, [0, 0], 0), (free, [0], 0)])
    assert [counter(name) - before[name] for name in weights] == [1.0, 0.0, 0.0]
    bench.scheduler.take([(light, [0], 0), (heavy, [], 0)])
    assert [counter(name) - before[name] for name in weights] == [1.0, 4.0, 0.0]


def test_the_last_token_is_never_computed() -> None:
    bench = SchedulerBench()
    bench.add("r", 4, max_tokens=2)
    bench.add("one", 4, max_tokens=1)
    first = launch(bench)
    second = launch(bench)
    assert counts(second) == {"r": 1}
    bench.process(first)
    assert schedule(bench) is None, "both have all their tokens, in flight"
    bench.process(second)
    assert bench.finished == {"r": 2, "one": 1}
    bench.assert_empty()


def test_a_request_that_ends_leaves_its_lease_to_the_steps_in_flight_and_nothing_else() -> None:
    bench = SchedulerBench()
    bench.manager.resident.add(KEY)
    request = bench.add("r", 4, max_tokens=9, adapter=KEY)
    first, second = launch(bench), launch(bench)
    bench.scheduler.finish(request)
    assert bench.kv.num_free(0) == bench.kv.num_usable(0)
    assert list(bench.scheduler.leased_request_ids) == ["r"] == [*bench.manager.leases]
    again = bench.add("r", 4, max_tokens=1, adapter=KEY)
    assert schedule(bench) is None, "the id holds a lease until the steps are read"
    bench.process(first)
    assert [*bench.manager.leases] == ["r"]
    bench.process(second)
    assert bench.manager.leases == {}
    assert len(request.token_ids) == 4, "what was sampled for it is dropped"
    bench.step()
    assert bench.finished == {"r": again.num_generated_tokens}
    bench.assert_empty()


def test_nobody_is_preempted_before_the_step_in_flight_is_read() -> None:
    bench = SchedulerBench(num_blocks=4)
    old, new = (bench.add(name, 2 * BLOCK, max_tokens=8) for name in ("old", "new"))
    first = launch(bench)
    assert bench.scheduler.can_plan_ahead
    assert schedule(bench) is None, "each needs a third block"
    assert not bench.scheduler.can_plan_ahead
    assert bench.scheduler.num_preemptions == 0
    bench.process(first)
    assert counts(launch(bench)) == {"old": 1}
    assert (bench.scheduler.num_preemptions, new.num_computed_tokens) == (1, 0)
    assert bench.scheduler.can_plan_ahead
    assert old.kv.num_writable == 3 * BLOCK


def test_a_group_forks_from_nobody_in_flight() -> None:
    bench = SchedulerBench()
    parent = bench.add("parent", BLOCK + 2, max_tokens=20, group="g")
    child = bench.add("child", BLOCK + 2, max_tokens=20, group="g")
    first = launch(bench)
    assert counts(first) == {"parent": BLOCK + 2}
    second = launch(bench)
    assert counts(second) == {"parent": 1}
    assert not bench.scheduler.can_plan_ahead
    bench.process(first)
    bench.process(second)
    assert counts(schedule(bench)) == {"parent": 1, "child": 1}
    assert child.kv.tables[0][0] == parent.kv.tables[0][0]


def test_blocks_are_published_when_the_step_that_filled_them_is_read() -> None:
    bench = SchedulerBench(prefix_caching=True)
    bench.add("r", 2 * BLOCK + 1, max_tokens=20)
    first = launch(bench)
    assert not bench.kv.groups[0].cached._prefixes
    second = launch(bench)
    bench.process(first)
    assert len(bench.kv.groups[0].cached._prefixes) == 2
    bench.process(second)


class Counting:
    """A policy that wants a token for everybody, and rests when it is told to."""

    def __init__(self) -> None:
        self.rests = False
        self.num_plans = self.num_passed = 0

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        self.num_plans += 1
        return dict.fromkeys(decodes, 1)

    def pass_over(self) -> None:
        self.num_passed += 1


def test_drafts_are_planned_only_behind_known_tokens() -> None:
    bench, policy = SchedulerBench(), Counting()
    bench.scheduler._drafts = policy
    bench.add("r", 4, max_tokens=20)
    first = launch(bench)
    assert not bench.scheduler.can_plan_ahead
    policy.rests = True
    assert bench.scheduler.can_plan_ahead
    second = launch(bench)
    assert (policy.num_plans, policy.num_passed) == (0, 1), "the prompt's step had no decodes"
    bench.process(first)
    bench.process(second)
    (drafting,) = launch(bench).sequences
    assert drafting.num_draft_tokens == 1
    assert policy.num_plans == 1
