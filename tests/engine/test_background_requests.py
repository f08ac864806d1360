"""Background requests run only while the engine has no other request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import DeadlineExceeded, NotNow, Overloaded, TenantQueueFull
from support.scheduling import SchedulerBench, counts

ABSENT = AdapterKey("acme", "sha256:aa")


def test_they_run_while_there_are_no_others() -> None:
    bench = SchedulerBench()
    bench.add("line", 4, max_tokens=3, is_background=True)
    assert counts(bench.step()) == {"line": 4}
    bench.run()
    assert bench.finished == {"line": 3}
    bench.assert_empty()


def test_a_request_that_arrives_has_every_step_to_itself() -> None:
    bench = SchedulerBench()
    bench.add("line", 4, max_tokens=9, is_background=True)
    bench.step()
    bench.add("chat", 4, max_tokens=3, tenant="bolt")
    assert [counts(bench.step()) for _ in range(3)] == [{"chat": 4}, {"chat": 1}, {"chat": 1}]
    assert bench.state("line") == "waiting"
    bench.run()
    assert bench.finished == {"chat": 3, "line": 9}
    bench.assert_empty()


def test_they_leave_their_blocks_and_places_to_a_request_that_arrives() -> None:
    bench = SchedulerBench(num_blocks=8, max_num_seqs=1)
    bench.add("line", 20, max_tokens=12, is_background=True)
    bench.step()
    bench.add("chat", 20, max_tokens=12)
    assert set(counts(bench.step())) == {"chat"}
    bench.run()
    assert bench.finished == {"chat": 12, "line": 12}
    bench.assert_empty()


def test_they_go_on_from_the_prefix_cache() -> None:
    bench = SchedulerBench(prefix_caching=True)
    line = bench.add("line", list(range(8)), max_tokens=9, is_background=True)
    for _ in range(4):
        bench.step()
    num_generated = line.num_generated_tokens
    bench.add("chat", [9] * 4)
    bench.step()
    resumed = bench.step()
    assert sum(counts(resumed).values()) < 8 + num_generated
    bench.run()
    assert bench.finished == {"chat": 1, "line": 9}


def test_they_wait_for_a_request_whose_adapter_is_being_loaded() -> None:
    bench = SchedulerBench()
    bench.add("chat", 4, adapter=ABSENT)
    bench.add("line", 4, is_background=True)
    assert bench.step() is None
    bench.manager.resident.add(ABSENT)
    assert counts(bench.step()) == {"chat": 4}
    assert counts(bench.step()) == {"line": 4}


def test_a_step_in_flight_ends_before_they_are_preempted() -> None:
    bench = SchedulerBench()
    bench.add("line", 4, max_tokens=9, is_background=True)
    in_flight, _, _ = bench.scheduler.schedule()
    assert in_flight is not None
    bench.scheduler.note_launch(in_flight.sequences)
    bench.add("chat", 4, max_tokens=2)
    ahead, _, _ = bench.scheduler.schedule()
    assert counts(ahead) == {"chat": 4}
    assert bench.state("line") == "running"
    assert not bench.scheduler.can_plan_ahead
    assert ahead is not None
    bench.scheduler.note_launch(ahead.sequences)
    bench.process(in_flight)
    bench.process(ahead)
    assert counts(bench.step()) == {"chat": 1}
    assert bench.state("line") == "waiting"
    bench.run()
    assert bench.finished == {"chat": 2, "line": 9}
    bench.assert_empty()


def test_they_do_not_count_against_the_share_of_their_tenant() -> None:
    bench = SchedulerBench()
    bench.add("line", 4, max_tokens=50, is_background=True)
    bench.run()
    assert bench.scheduler.counters.counter("acme") == 0


@pytest.mark.parametrize("are_in_front", [False, True])
@pytest.mark.parametrize("are_held", [False, True])
@pytest.mark.parametrize(
    ("limits", "refusal"),
    [({"max_queued_per_tenant": 1}, TenantQueueFull), ({"max_queued": 1}, Overloaded)],
    ids=["of a tenant", "of all"],
)
def test_they_do_not_fill_the_queue(
    limits: dict[str, Any], refusal: type[NotNow], are_held: bool, are_in_front: bool
) -> None:
    bench = SchedulerBench(max_num_seqs=1, **limits)
    lines = [
        bench.add(f"line-{number}", 4, max_tokens=9, is_background=True, is_held=are_held)
        for number in range(5)
    ]
    if are_in_front:
        bench.step()
    bench.add("chat", 4)
    with pytest.raises(refusal):
        bench.add("more", 4)
    for line in lines if are_held else ():
        bench.scheduler.release(line)
    bench.run()
    bench.assert_empty()


@pytest.mark.parametrize("others", [[], ["chat"]], ids=["in front", "standing back"])
def test_one_that_is_aborted_leaves_nothing(others: list[str]) -> None:
    bench = SchedulerBench()
    line = bench.add("line", 4, max_tokens=9, is_background=True)
    bench.step()
    for name in others:
        bench.add(name, 4, max_tokens=3)
        bench.step()
    bench.scheduler.finish(line)
    bench.run()
    bench.assert_empty()


def test_one_that_stands_back_ends_at_its_deadline() -> None:
    bench = SchedulerBench(step_seconds=1.0)
    bench.add("chat", 4, max_tokens=9)
    bench.add("line", 4, deadline=2.0, is_background=True)
    bench.run()
    assert isinstance(bench.failed["line"], DeadlineExceeded)
    bench.assert_empty()


def test_one_that_was_held_waits_for_the_others_too() -> None:
    bench = SchedulerBench()
    line = bench.add("line", 4, is_held=True, is_background=True)
    bench.add("chat", 4, max_tokens=2)
    bench.step()
    bench.scheduler.release(line)
    assert counts(bench.step()) == {"chat": 1}
    bench.run()
    assert list(bench.finished) == ["chat", "line"]
    bench.assert_empty()


@pytest.mark.parametrize("seed", range(10))
def test_no_step_mixes_them_with_others_and_all_end(seed: int) -> None:
    draw = random.Random(seed)
    bench = SchedulerBench(
        num_blocks=16, budget=12, max_num_seqs=4, prefix_caching=True, num_swap_slots=seed % 2 * 8
    )
    is_background: dict[str, bool] = {}
    for number in range(60):
        name = f"r{number}"
        is_background[name] = draw.random() < 0.6
        bench.add(
            name,
            [draw.randrange(3) for _ in range(draw.randint(1, 20))],
            draw.randint(1, 12),
            tenant=draw.choice(["acme", "bolt"]),
            group=draw.choice([None, "g"]),
            is_background=is_background[name],
        )
        for _ in range(draw.randint(0, 4)):
            others_are_there = any(
                not is_background[request.request_id] for request in bench.scheduler.requests()
            )
            if batch := bench.step():
                kinds = {is_background[sequence.request.request_id] for sequence in batch.sequences}
                assert kinds == {not others_are_there}
        if draw.random() < 0.1 and (left := bench.scheduler.requests()):
            aborted = draw.choice(list(left))
            bench.scheduler.finish(aborted)
            bench.finished[aborted.request_id] = aborted.num_generated_tokens
    bench.run()
    assert bench.finished.keys() == is_background.keys()
    bench.assert_empty()
