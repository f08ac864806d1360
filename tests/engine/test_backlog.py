"""The reported wait of a new request."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.backlog import Backlog
from loraplex.engine.scheduling.step_costs import StepCosts, StepShape

RUNNING = StepShape(0, 10, 1000)


def make_request(tenant: str, prompt: int, weight: float = 1.0) -> Request:
    submitted = GenerationRequest(
        f"{tenant}-{prompt}", tenant, [1] * prompt, SamplingParams(), tenant_weight=weight
    )
    return Request(submitted, CacheNamespace(tenant, "runtime", None), 0, 0.0, None)


@pytest.fixture
def backlog() -> Backlog:
    """A prompt token takes 1 ms, a step of ten decodes 10 ms."""
    costs = StepCosts()
    for size in range(1, 500):
        costs.observe(StepShape(size, size % 10, 0), 1e-3 * size + 1e-3 * (size % 10))
    return Backlog(costs)


def test_nobody_ahead_is_no_wait(backlog: Backlog) -> None:
    backlog.enter(make_request("a", 1000))
    assert backlog.wait_seconds(make_request("b", 10), RUNNING, num_free=0) == 0.0


def test_a_tenant_waits_for_its_own_prompts_at_its_share(backlog: Backlog) -> None:
    backlog.enter(make_request("a", 100))
    for _ in range(10):
        backlog.enter(make_request("b", 1000))

    def wait(tenant: str) -> float:
        return backlog.wait_seconds(make_request(tenant, 1), RUNNING, num_free=99)

    assert wait("a") == pytest.approx(0.2, rel=0.1)
    assert wait("b") == pytest.approx(10.1, rel=0.1)


def test_who_left_is_not_waited_for(backlog: Backlog) -> None:
    ahead = make_request("a", 100)
    backlog.enter(ahead)
    backlog.leave(ahead)
    assert backlog.wait_seconds(make_request("a", 1), RUNNING, num_free=0) == 0.0


def test_prompts_and_outputs_ahead_count_up_to_those_of_all() -> None:
    costs = Mock(spec=StepCosts)
    backlog, newcomer = Backlog(costs), make_request("a", 1)

    def ahead(num_free: int) -> tuple[int, int]:
        backlog.wait_seconds(newcomer, RUNNING, num_free=num_free)
        num_prompt_tokens, num_output_tokens, running = costs.wait_seconds.call_args.args
        assert running is RUNNING
        return num_prompt_tokens, num_output_tokens

    def ends(number: int, tokens: float) -> int:
        """A standard deviation more than as many ends take."""
        return int((number + number**0.5) * tokens)

    large = make_request("b", 1000, weight=2.0)
    small = make_request("c", 10)
    for request in (make_request("a", 100), large, make_request("a", 50), small):
        backlog.enter(request)
    assert ahead(0) == (4 * 150, 0), "no output is known"
    backlog.learn_output(100)
    assert ahead(0) == (4 * 150, ends(5, 100))
    backlog.learn_output(300)
    assert ahead(0) == (4 * 150, ends(5, 110))
    assert ahead(2) == (4 * 150, ends(3, 110))
    assert ahead(5) == ahead(6) == (4 * 150, 0)
    backlog.leave(large)
    assert ahead(0) == (160, ends(4, 110))
    backlog.leave(small)
    assert ahead(0) == (150, ends(3, 110))


def test_those_of_the_tenant_that_are_due_later_are_not_ahead() -> None:
    costs = Mock(spec=StepCosts)
    backlog, strict = Backlog(costs), make_request("a", 1)
    strict.due_time = 5.0
    for due_time, num_tokens in ((4.0, 100), (5.0, 10), (5.1, 1000)):
        other = make_request("a", num_tokens)
        other.due_time = due_time
        backlog.enter(other)
    backlog.wait_seconds(strict, RUNNING, num_free=0)
    assert costs.wait_seconds.call_args.args == (110, 0, RUNNING)
    strict.due_time = 3.0
    assert backlog.wait_seconds(strict, RUNNING, num_free=0) == 0.0


def test_a_full_batch_makes_room_only_as_outputs_end(backlog: Backlog) -> None:
    backlog.enter(make_request("a", 100))
    newcomer = make_request("a", 1)
    without = backlog.wait_seconds(newcomer, RUNNING, num_free=99)
    backlog.learn_output(50)
    assert backlog.wait_seconds(newcomer, RUNNING, num_free=99) == without
    assert backlog.wait_seconds(newcomer, RUNNING, num_free=0) > without
