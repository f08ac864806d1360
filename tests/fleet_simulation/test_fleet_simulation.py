"""The simulated fleet keeps the router's rules, replays, and catches planted mistakes."""

from __future__ import annotations

import pytest

from loraplex.engine.fleet.replica_state import ReplicaState

from .planted import MISTAKES, SIZE, caught_by
from .policies import POLICIES
from .replica import SimulatedReplica
from .runs import Run
from .scenario import MAX_BATCH, Size, replica_capacity
from .workload import SimulatedRequest, Workload

SMALL = Size(num_replicas=12, num_adapters=900, warm_seconds=3, measured_seconds=6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_serves_a_small_fleet_through_failures(policy: str) -> None:
    outcome = Run(SIZE, 0.5, 3, policy).outcome()
    assert outcome.num_requests > 400
    assert 0 < outcome.ttft_p50_seconds <= outcome.ttft_p99_seconds


def test_our_router_keeps_its_rules_and_loads_less_than_two_choices() -> None:
    ours = Run(SMALL, 0.7, 1, "ours").outcome()
    two_choices = Run(SMALL, 0.7, 1, "two_choices").outcome()
    assert ours.hit_rate > two_choices.hit_rate
    assert ours.gigabytes_loaded < two_choices.gigabytes_loaded
    assert ours.num_waiting < two_choices.num_waiting


def test_a_seed_replays_identically() -> None:
    assert Run(SIZE, 0.85, 5, "ours").outcome() == Run(SIZE, 0.85, 5, "ours").outcome()
    assert Run(SIZE, 0.85, 5, "ours").outcome() != Run(SIZE, 0.85, 6, "ours").outcome()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught_by_the_rule_that_it_breaks(name: str) -> None:
    assert caught_by(name) is MISTAKES[name][1]


def test_runs_of_equal_steps_end_when_single_steps_would() -> None:
    """A lone request takes one prompt step and one decode step for each further token."""
    ends: list[float] = []
    events: list[tuple[float, object]] = []
    workload = Workload(SIZE.scenario(1, 0.5))
    request = _base_request(workload)
    replica = SimulatedReplica(
        "r", {}, lambda time, call: events.append((time, call)), lambda *_: ends.append(now)
    )
    now = 0.0
    replica.submit(request, now)
    while events:
        now, call = events.pop(0)
        assert callable(call)
        call()
    prompt = 8.5e-3 + 5.5e-5 + 3.66e-5 * request.num_prompt_tokens
    token = 8.5e-3 + 7.5e-5 + 5.5e-5
    assert request.num_prompt_tokens <= 1024
    assert ends == [pytest.approx(prompt + token * (request.num_output_tokens - 1))]
    assert replica.state is ReplicaState.READY


def test_the_capacity_is_what_full_batches_serve() -> None:
    """At full batches, decoding takes one step per 64 tokens."""
    step = 8.5e-3 + 64 * 7.5e-5 + 32 * 5.5e-5
    seconds = 127 * step / MAX_BATCH + 312 * 3.66e-5
    assert replica_capacity() == pytest.approx(1 / seconds)


def _base_request(workload: Workload) -> SimulatedRequest:
    while True:
        [request, *others] = workload.arrival(0.0)
        if request.routed.adapter is None and not others and request.num_prompt_tokens <= 1024:
            return request
