"""A replica whose stages are on two nodes of a Ray cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from openai import OpenAIError

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.demo.recipe import BASE_NAME
from support.engine import LocalEngine
from support.ray_fleet import BASE, MEMORY_OPTIONS, RayFleet, running_ray
from support.server import Caller
from support.waiting import wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="`make test-ray` installs Ray"),
]
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    with running_ray(num_cpus=1, num_stages=2) as running:
        yield running


@pytest.fixture(scope="module")
def caller(fleet: RayFleet) -> Iterator[Caller]:
    started = fleet.up(1, "--num-cpus", "1")
    assert started.returncode == ExitCode.OK, started.stderr
    with fleet.serving("api", *MEMORY_OPTIONS) as server:
        fleet.wait_ready(1)
        yield server.make_caller("acme")


def ask(caller: Caller, num_tokens: int = 16) -> list[float]:
    """The log-probabilities of a greedy answer's tokens."""
    answer = caller.openai.completions.create(
        model=BASE_NAME,
        prompt=PROMPT,
        max_tokens=num_tokens,
        temperature=0.0,
        logprobs=0,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    return [each for each in choice.logprobs.token_logprobs if each is not None]


def one_rank(tmp_path: Path) -> list[float]:
    """The same of an engine of one process."""
    alone = LocalEngine(BASE, tmp_path, num_threads=1)
    try:
        name = alone.submit(PROMPT, max_tokens=16, ignore_eos=True, num_logprobs=0)
        alone.run()
        return [each.chosen.logprob for each in alone.answers[name].logprobs]
    finally:
        alone.close()


def test_stages_on_two_nodes_answer_as_one_rank_and_come_back_when_a_follower_is_killed(
    fleet: RayFleet, caller: Caller, tmp_path: Path
) -> None:
    expected = one_rank(tmp_path)
    (replica,) = fleet.rows().values()
    (follower,) = fleet.stage_rank_pids()
    assert len(fleet.nodes_of(follower, fleet.agent_pid(replica.id))) == 2
    assert ask(caller) == pytest.approx(expected, abs=1e-4)
    os.kill(follower, signal.SIGKILL)

    codes = []

    def is_back() -> bool:
        try:
            return ask(caller) == pytest.approx(expected, abs=1e-4)
        except OpenAIError as exc:
            codes.append(getattr(exc, "code", None))
            return False

    wait_for(lambda: follower not in fleet.stage_rank_pids() and is_back(), seconds=120)
    assert set(codes) <= {"engine_restarted", "engine_unavailable"}
