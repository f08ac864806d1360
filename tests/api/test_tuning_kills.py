"""A server killed between two effects of a job, or at any moment: the job ends, each step is
charged once, and no trainer outlives its server."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from openai import OpenAI

from loraplex.adapters.failpoints import TUNING_FAILPOINTS, VARIABLE
from support.mortal_server import is_alive
from support.server import Caller, ServerUnderTest, live_until, serving
from support.tuning_jobs import create, ended, examples, num_tokens, trained_tokens, trainers
from support.waiting import wait_for

pytestmark = pytest.mark.slow

NAME = ("--served-model-name", "tiny")
TRAINER = {"LORAPLEX_TUNING": "true", "TEST_TRAINER": "support.fake_trainer"}
NUM_EXAMPLES = 40


def check_exact(server: ServerUnderTest, caller: Caller, job_id: str) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key=caller.key)
    job = ended(client, job_id, seconds=300)
    assert (job.status, job.fine_tuned_model) == ("succeeded", "bot@1")
    assert job.trained_tokens == num_tokens(NUM_EXAMPLES) == trained_tokens(server, caller)


def test_a_job_that_is_killed_after_each_effect_is_exact(tiny_base: Path, tmp_path: Path) -> None:
    """Each start of the server resumes it, comes to the next failpoint, and is killed there."""
    begun, *later = TUNING_FAILPOINTS
    with serving(tiny_base, tmp_path, *NAME, **TRAINER, **{VARIABLE: begun}) as armed:
        caller = armed.make_caller("acme")
        job_id = create(caller.openai, examples("", NUM_EXAMPLES)).id
        assert armed.process.wait(120) == -signal.SIGKILL
    for point in later:
        live_until(point, tiny_base, tmp_path, *NAME, **TRAINER)
    with serving(tiny_base, tmp_path, *NAME, **TRAINER) as server:
        check_exact(server, caller, job_id)


def test_kills_at_any_moment_lose_no_step_and_leave_no_trainer(
    tiny_base: Path, tmp_path: Path
) -> None:
    rng = random.Random(117)
    with serving(tiny_base, tmp_path, *NAME, **TRAINER) as server:
        caller = server.make_caller("acme")
        job_id = create(caller.openai, examples("slow die-1", NUM_EXAMPLES)).id
        wait_for(lambda: bool(trainers(server)), seconds=120)
        time.sleep(rng.uniform(0, 2))
        pids = trainers(server)
        server.process.kill()
        server.process.wait(60)
        wait_for(lambda: not any(map(is_alive, pids)), seconds=30)
    with serving(tiny_base, tmp_path, *NAME, **TRAINER) as server:
        check_exact(server, caller, job_id)
