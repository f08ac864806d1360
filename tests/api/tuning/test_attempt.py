"""One trainer process beside an engine that is busy or idle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.tuning.attempt import Attempt
from loraplex.api.tuning.trainer_place import TrainerPlace
from loraplex.api.tuning.work_folders import WorkFolder
from loraplex.engine.tuning.messages import Finished
from loraplex.platform.database import Database
from loraplex.platform.models import UsageDay
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tuning.models import TuningJob
from loraplex.platform.tuning.states import JobState
from support.attempts import INFO, make_job, setup_of
from support.checkpoints import make_checkpoint_store
from support.fake_trainer import State, write_state
from support.tuning_jobs import examples, num_tokens

NUM_EXAMPLES = 40


@pytest.mark.slow
def test_steps_of_a_checkpoint_that_no_report_named_are_counted_before_the_next_one(
    database: Database, tiny_base: Path, tmp_path: Path
) -> None:
    """The server was killed before it reported them; the job is cancelled soon after."""
    job = make_job(database)
    folder = WorkFolder(tmp_path / "work")
    folder.make()
    folder.training_file.write_bytes(examples("slow", NUM_EXAMPLES))
    write_state(folder.checkpoints, State(8, num_tokens(8)))
    engine: Any = SimpleNamespace(stats=SimpleNamespace(num_running=0, num_waiting=0), info=INFO)
    setup = setup_of(tiny_base, engine)
    control_plane = ControlPlane(database, b"s" * 32)
    checkpoints = make_checkpoint_store(control_plane, tmp_path / "store")

    def cancel(session: TenantSession) -> None:
        session.get_one(TuningJob, job.id).state = JobState.CANCELLED

    async def run() -> Attempt:
        attempt = Attempt(setup, control_plane, Metrics(lambda: None), job, folder, checkpoints)
        running = asyncio.create_task(attempt.run())
        while not attempt.job.step:
            await asyncio.sleep(0.05)
        await control_plane.write(job.tenant_id, cancel)
        assert await running is None
        return attempt

    attempt = asyncio.run(run())
    control_plane.close()
    assert 8 <= attempt.job.step < NUM_EXAMPLES
    assert attempt.job.num_tokens == num_tokens(attempt.job.step)
    with database.transaction(job.tenant_id, read_only=True) as session:
        (charged,) = session.scalars(select(UsageDay.trained_tokens))
    assert charged == attempt.job.num_tokens


@pytest.mark.slow
def test_training_waits_while_the_engine_is_busy_and_ends_when_it_is_idle(
    database: Database, tiny_base: Path, tmp_path: Path
) -> None:
    job = make_job(database)
    folder = WorkFolder(tmp_path / "work")
    folder.make()
    folder.training_file.write_bytes(examples("slow", NUM_EXAMPLES))
    stats = SimpleNamespace(num_running=0, num_waiting=0)
    engine: Any = SimpleNamespace(stats=stats, info=INFO)
    setup = setup_of(tiny_base, engine)
    control_plane = ControlPlane(database, b"s" * 32)
    checkpoints = make_checkpoint_store(control_plane, tmp_path / "store")

    async def run() -> tuple[Finished, list[int]]:
        attempt = Attempt(setup, control_plane, Metrics(lambda: None), job, folder, checkpoints)
        running = asyncio.create_task(attempt.run())
        while attempt.job.step < 3:
            await asyncio.sleep(0.1)
        stats.num_waiting = 1
        await asyncio.sleep(3.0)  # the pause is sent, obeyed and reported
        steps = [attempt.job.step]
        await asyncio.sleep(3.0)
        steps.append(attempt.job.step)
        stats.num_waiting = 0
        last_word = await running
        assert isinstance(last_word, Finished)
        return last_word, [*steps, attempt.job.step]

    finished, (paused_at, still_at, ended_at) = asyncio.run(run())
    control_plane.close()
    assert paused_at == still_at < NUM_EXAMPLES
    assert ended_at == NUM_EXAMPLES
    assert finished.num_tokens == num_tokens(NUM_EXAMPLES)
    assert folder.has_result


@pytest.mark.slow
def test_training_with_cpus_of_its_own_goes_on_while_the_engine_is_busy(
    database: Database, tiny_base: Path, tmp_path: Path
) -> None:
    job = make_job(database)
    folder = WorkFolder(tmp_path / "work")
    folder.make()
    folder.training_file.write_bytes(examples("slow", NUM_EXAMPLES))
    busy: Any = SimpleNamespace(stats=SimpleNamespace(num_running=3, num_waiting=2), info=INFO)
    place = TrainerPlace("cpu", cpus=(0,), shares_engine=False)
    control_plane = ControlPlane(database, b"s" * 32)
    checkpoints = make_checkpoint_store(control_plane, tmp_path / "store")
    metrics = Metrics(lambda: None)
    attempt = Attempt(
        setup_of(tiny_base, busy, place), control_plane, metrics, job, folder, checkpoints
    )
    last_word = asyncio.run(attempt.run())
    control_plane.close()
    assert isinstance(last_word, Finished)
    assert attempt.job.step == NUM_EXAMPLES
