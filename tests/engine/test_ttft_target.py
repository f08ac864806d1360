"""Requests under a TTFT target: who is refused, who lets others pass, and who is left alone."""

from __future__ import annotations

import pytest

from loraplex.engine.errors import Overloaded
from loraplex.engine.messages import LatencyTargets
from loraplex.engine.scheduling.step_costs import StepShape
from support.scheduling import SchedulerBench

TOKEN_SECONDS = 1e-3


def make_bench(target: float | None = 0.5, max_num_seqs: int = 1) -> SchedulerBench:
    """A prompt's token takes 1 ms and a decoding step 10 ms."""
    bench = SchedulerBench(
        budget=512, num_blocks=1024, max_num_seqs=max_num_seqs, target_ttft_seconds=target
    )
    for size in range(1, 300):
        num_decodes = size % 2
        seconds = TOKEN_SECONDS * size + 1e-2 * num_decodes
        bench.costs.observe(StepShape(size, num_decodes, 0), seconds)
    return bench


def test_what_cannot_begin_in_time_behind_its_tenants_others_is_refused_at_once() -> None:
    bench = make_bench()
    bench.add("first", 300)
    bench.add("second", 100)  # 300 ms of prompts ahead and 100 of its own
    with pytest.raises(Overloaded) as refused:
        bench.add("third", 150)  # 400 ms ahead and 150 of its own
    assert refused.value.retry_after_seconds == 1.0
    assert "0.40 s" in str(refused.value)
    assert "0.35 s" in str(refused.value)
    assert bench.scheduler.num_waiting == 2
    bench.run()
    assert bench.finished == {"first": 1, "second": 1}
    bench.assert_empty()


def test_the_longer_the_wait_the_later_a_refused_client_shall_come_again() -> None:
    bench = make_bench()
    bench.add("first", 450)
    for number in range(20):
        bench.add(f"further-{number}", 450, is_further=True)
    with pytest.raises(Overloaded) as refused:
        bench.add("late", 100)
    assert refused.value.retry_after_seconds == pytest.approx(21 * 0.45 - 0.4, rel=0.05)


def test_without_a_target_it_waits() -> None:
    bench = make_bench(target=None)
    for number in range(20):
        bench.add(f"r{number}", 300)
    bench.run()
    assert len(bench.finished) == 20


def test_nobody_is_refused_for_the_queue_of_another_tenant() -> None:
    bench = make_bench()
    for number in range(20):
        bench.add(f"r{number}", 300, is_further=True)
    with pytest.raises(Overloaded):
        bench.add("more", 100)
    bench.add("other", 100, tenant="quiet")


def test_a_prompt_that_takes_longer_than_the_target_is_refused_for_its_wait_alone() -> None:
    bench = make_bench(target=0.1)
    bench.add("long", 300)
    with pytest.raises(Overloaded):
        bench.add("another long", 300)
    bench.step()
    bench.add("another long", 300)
    bench.run()
    assert bench.finished.keys() == {"long", "another long"}


@pytest.mark.parametrize("exempt", ["is_background", "is_further", "prompt only"])
def test_requests_without_the_target_are_neither_refused_nor_late(exempt: str) -> None:
    bench = make_bench()
    bench.add("ahead", 450)
    max_tokens = 0 if exempt == "prompt only" else 1
    request = bench.add(
        "exempt",
        100,
        max_tokens,
        is_background=exempt == "is_background",
        is_further=exempt == "is_further",
    )
    assert request.late_at is None
    bench.now = 1e6
    bench.scheduler.schedule()
    assert not request.is_late


def test_a_request_that_waited_too_long_lets_those_pass_that_can_still_meet_the_target() -> None:
    bench = make_bench()
    bench.add("running", 4, max_tokens=3)
    bench.step()
    late = bench.add("late", 100)
    bench.now = 0.39
    bench.step()
    assert not late.is_late
    timely = bench.add("timely", 100)
    bench.now = 0.41
    bench.step()
    assert (late.is_late, timely.is_late) == (True, False)
    bench.step()
    assert (bench.state("late"), bench.state("timely")) == ("waiting", "gone")
    bench.run()
    assert bench.finished.keys() == {"running", "late", "timely"}
    bench.assert_empty()


@pytest.mark.parametrize(("seconds", "first"), [(29.8, "timely"), (30.2, "late")])
def test_a_late_request_is_passed_by_those_that_come_within_30_seconds(
    seconds: float, first: str
) -> None:
    bench = make_bench()
    bench.add("running", 4, max_tokens=3)
    bench.step()
    bench.add("late", 10)
    bench.now = 29.0
    bench.step()
    bench.now = seconds
    bench.add("timely", 10)
    bench.run()
    assert [*bench.started][1] == first


def test_who_has_begun_is_not_late_and_who_is_held_up_before_it_waits_is() -> None:
    bench = make_bench(max_num_seqs=2)
    begun = bench.add("begun", 4, max_tokens=9)
    held = bench.add("held", 4, is_held=True)
    bench.step()
    bench.now = 2.0
    bench.step()
    assert (begun.is_late, held.is_late) == (False, True)
    bench.scheduler.release(held)
    assert bench.scheduler._waiting.tickets["held"].rank == pytest.approx(30.5)
    bench.run()
    bench.assert_empty()


def test_a_stricter_request_passes_those_that_it_finds_and_is_judged_by_those_ahead_alone() -> None:
    bench = make_bench(target=3.0)
    bench.add("running", 4, max_tokens=3)
    bench.step()
    for name in ("lenient", "another lenient"):
        bench.add(name, 450)
    bench.add("strict", 100, targets=LatencyTargets(0.5))  # behind the others it would take 1 s
    with pytest.raises(Overloaded):
        bench.add("second strict", 450, targets=LatencyTargets(0.5))
    bench.run()
    assert [*bench.started] == ["running", "strict", "lenient", "another lenient"]


@pytest.mark.parametrize(("seconds", "first"), [(2.4, "strict"), (2.6, "lenient")])
def test_a_lenient_request_is_passed_by_the_strict_only_as_far_as_they_are_due_before_it(
    seconds: float, first: str
) -> None:
    bench = make_bench(target=3.0)
    bench.add("running", 4, max_tokens=3)
    bench.step()
    bench.add("lenient", 10)
    bench.now = seconds
    bench.add("strict", 10, targets=LatencyTargets(0.5))
    bench.run()
    assert [*bench.started][1] == first


def test_each_request_is_late_by_its_own_target_and_by_the_servers_without_one() -> None:
    bench = make_bench(target=2.0)
    bench.add("running", 4, max_tokens=9)
    bench.step()
    strict = bench.add("strict", 10, targets=LatencyTargets(0.5))
    lenient = bench.add("lenient", 10, targets=LatencyTargets(itl_seconds=0.1))
    bench.now = 1.0
    bench.step()
    assert (strict.is_late, lenient.is_late) == (True, False)
    assert lenient.targets == LatencyTargets(2.0, 0.1)


def test_a_step_is_bounded_by_the_strictest_of_its_decodes() -> None:
    def num_prompt_tokens(*targets: float | None) -> int:
        """Of the step that decodes one request for each target."""
        bench = make_bench(target=None, max_num_seqs=8)
        for number, target in enumerate(targets):
            bench.add(f"r{number}", 4, max_tokens=9, targets=LatencyTargets(None, target))
        bench.step()
        bench.add("prompt", 450)
        batch = bench.step()
        assert batch
        return batch.shape.num_prefill_tokens

    strictest = num_prompt_tokens(0.1, None, 0.3)
    assert 60 <= strictest <= 100
    assert num_prompt_tokens(0.3, None, None) > strictest + 150
    assert num_prompt_tokens(None, None, None) == 450
