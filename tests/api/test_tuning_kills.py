"""A server killed between two effects of a job, or at any moment: the job ends, each step is
charged once, and no trainer outlives its server."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from sqlalchemy import select

from loraplex.adapters.failpoints import TUNING_FAILPOINTS, VARIABLE
from loraplex.platform.jobs.models import JobLease
from loraplex.platform.models import StoredCheckpoint
from loraplex.platform.servers.models import Server
from support.mortal_server import is_alive
from support.server import Caller, ServerUnderTest, live_until, serving
from support.tuning_jobs import (
    create,
    ended,
    examples,
    messages,
    num_tokens,
    trained_tokens,
    trainers,
)
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


def test_another_server_goes_on_from_the_checkpoint_of_a_lost_one(
    tiny_base: Path, tmp_path: Path
) -> None:
    """The lost server stored its first checkpoint, and trained further."""
    with serving(tiny_base, tmp_path / "1", *NAME, **TRAINER) as first:
        caller = first.make_caller("acme")
        job_id = create(caller.openai, examples("slow", NUM_EXAMPLES)).id
        wait_for(lambda: bool(stored_steps(first, caller)), seconds=120)
        (step,) = stored_steps(first, caller)
        charged = num_tokens(step + 2)
        wait_for(lambda: trained_tokens(first, caller) >= charged, seconds=60)
        first.process.kill()
        first.process.wait(60)
    shared = {
        "LORAPLEX_DATABASE": first.settings.database_url,
        "LORAPLEX_STORE": first.settings.store_url,
        "LORAPLEX_SECRET": first.settings.load_secrets()[0].hex(),
    }
    forget_server(first)
    with serving(tiny_base, tmp_path / "2", *NAME, **TRAINER, **shared) as second:
        check_exact(second, caller, job_id)
        client = OpenAI(base_url=f"{second.url}/v1", api_key=caller.key)
        begun = [text for text in messages(client, job_id) if text.startswith("Training ")]
        assert [text.split(":")[0] for text in begun] == [
            "Training begins",
            f"Training goes on after step {step}",
        ]
        wait_for(lambda: not stored_objects(first, caller), seconds=30)
        assert stored_steps(second, caller) == []


def test_a_deleted_tenants_checkpoints_are_erased(tiny_base: Path, tmp_path: Path) -> None:
    with serving(tiny_base, tmp_path, *NAME, **TRAINER) as server:
        caller = server.make_caller("acme")
        job_id = create(caller.openai, examples("slow", NUM_EXAMPLES)).id
        wait_for(lambda: bool(stored_steps(server, caller)), seconds=120)
        caller.openai.fine_tuning.jobs.pause(job_id)
        wait_for(lambda: len(stored_objects(server, caller)) == 2, seconds=60)
        headers = {"authorization": f"Bearer {server.make_operator('root')}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as operator:
            answer = operator.delete("/admin/tenants/acme", params={"confirm": "acme"})
            assert answer.is_success, answer.text
        wait_for(lambda: not list(tenant_files(server, caller)), seconds=60)
        wait_for(lambda: stored_steps(server, caller) == [], seconds=60)


def stored_steps(server: ServerUnderTest, caller: Caller) -> list[int]:
    """Of the tenant's checkpoints in the store."""
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        steps = session.scalars(select(StoredCheckpoint.step)).all()
    database.close()
    return sorted(steps)


def tenant_files(server: ServerUnderTest, caller: Caller) -> Iterator[Path]:
    """Everything in the store that is the tenant's."""
    store = Path(server.settings.store_url.removeprefix("file://"))
    return filter(Path.is_file, (store / "t" / caller.tenant_id).rglob("*"))


def stored_objects(server: ServerUnderTest, caller: Caller) -> list[Path]:
    """Those that are checkpoints."""
    return [path for path in tenant_files(server, caller) if path.parts[-3] == "c"]


def forget_server(server: ServerUnderTest) -> None:
    """A minute passes in which the server is not seen, and its leases end."""
    database = server.database
    with database.platform_transaction() as session:
        for row in session.scalars(select(Server)):
            row.seen_at = row.seen_at.replace(year=2000)
        for lease in session.scalars(select(JobLease)):
            lease.expires_at = lease.expires_at and lease.expires_at.replace(year=2000)
    database.close()
