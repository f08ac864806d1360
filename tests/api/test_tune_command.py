"""`loraplex tune` and `loraplex jobs` with a running server."""

from __future__ import annotations

from pathlib import Path
from threading import Timer

import pytest

from loraplex.api.cli.exit_codes import ExitCode
from support.command import Command
from support.server import Caller
from support.tuning_jobs import create, ended, examples, messages, num_tokens


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_bytes(examples())
    return path


@pytest.fixture
def tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller, "tune")


@pytest.fixture
def jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller, "jobs")


def test_tune_watches_the_job_until_its_adapter_is_ready(
    tune: Command, caller: Caller, data: Path
) -> None:
    code, out, err = tune(
        *(str(data), "bot", "--watch", "--epochs", "2", "--validation", str(data), "--seed", "3")
    )
    assert (code, out) == (ExitCode.OK, "")
    assert f"bot@1 is ready: {num_tokens(num_epochs=2)} tokens were trained." in err
    (job,) = caller.openai.fine_tuning.jobs.list()
    assert (job.seed, job.hyperparameters.n_epochs) == (3, 2)
    assert job.validation_file is not None


def test_a_job_that_fails_ends_the_command_with_its_code(tune: Command, data: Path) -> None:
    data.write_bytes(examples("wrong"))
    code, _, err = tune(str(data), "bot", "--watch")
    assert code == ExitCode.FAILED
    assert "Line 2: `messages` is missing (invalid_training_data)" in err


def test_jobs_are_listed_shown_paused_resumed_and_cancelled(jobs: Command, caller: Caller) -> None:
    job = create(caller.openai, examples("slow", 200))
    assert [each["id"] for each in jobs.ask("list")] == [job.id]
    assert jobs.ask("show", job.id)["events"][-1]["message"] == "The job was created."
    paused = jobs.ask("pause", job.id)
    assert (paused["status"], paused["pause_reason"]) == ("paused", "requested")
    assert jobs.ask("resume", job.id)["status"] == "queued"
    assert jobs.ask("cancel", job.id)["status"] == "cancelled"
    assert "The job was cancelled." in messages(caller.openai, job.id)
    code, out, _ = jobs("show", job.id)
    assert code == ExitCode.OK
    assert "cancelled" in out


@pytest.mark.slow
def test_watch_follows_a_job_that_was_begun_before(jobs: Command, caller: Caller) -> None:
    job = create(caller.openai)
    assert jobs.ask("watch", job.id)["fine_tuned_model"] == "bot@1"
    assert ended(caller.openai, job.id).status == "succeeded"


@pytest.mark.slow
def test_watch_says_why_a_job_is_paused(jobs: Command, caller: Caller) -> None:
    job = create(caller.openai, examples("slow", 4))
    caller.openai.fine_tuning.jobs.pause(job.id)
    resume = Timer(1.5, caller.openai.fine_tuning.jobs.resume, [job.id])
    resume.start()
    try:
        code, _, err = jobs("watch", job.id)
    finally:
        resume.join()
    assert code == ExitCode.OK
    assert f"{job.id}: paused (requested), step" in err
