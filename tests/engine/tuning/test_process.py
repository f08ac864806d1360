"""The trainer process: its confinement, its orders, and its end at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import pytest

from loraplex.adapters import confinement_probe as probe
from loraplex.engine.tuning.environment import trainer_environment
from loraplex.engine.tuning.messages import (
    Checkpointed,
    Failed,
    Finished,
    Pause,
    Paused,
    Ready,
    Stop,
    Stopped,
    Trained,
)
from support.models import make_tiny_llama
from support.tuning import (
    TrainerProcess,
    chat_line,
    of_kind,
    open_order,
    recipe,
    train,
    train_here,
    write_lines,
)

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [chat_line(f"Question {number}", "42!") for number in range(40)]
    return write_lines(tmp_path_factory.mktemp("data") / "lines", lines)


def test_a_confined_trainer_reaches_only_its_files(base: Path, tmp_path: Path) -> None:
    """The same acts as the probe of examinations tries."""
    with ExitStack() as stack:
        probed = tmp_path / "probed"
        probed.mkdir()
        targets = asdict(probe._prepare(probed, stack))
        memory_bytes = probe._LIMITS.memory_bytes
        cpu = min(os.sched_getaffinity(0))
        order = open_order(
            base, tmp_path / "lines", tmp_path, max_memory_bytes=memory_bytes, cpus=(cpu,)
        )
        (tmp_path / "lines").write_text(json.dumps(targets))
        with TrainerProcess(order, "support.probing_trainer") as trainer:
            failed = trainer.receive()
    assert isinstance(failed, Failed)
    found = json.loads(failed.message)
    assert found["possible"] in ([], ["connect_unix_socket"]), "only modes guard socket files"
    assert found["niceness"] == 19
    assert found["cpus"] == [cpu]
    assert found["core"] == [0, 0]
    assert not found["torch"]
    assert (tmp_path / "result" / "written").exists()


@pytest.mark.slow
def test_the_system_ends_a_trainer_first(base: Path, data: Path, tmp_path: Path) -> None:
    with TrainerProcess(open_order(base, data, tmp_path)) as trainer:
        trainer.send(Pause())
        trainer.receive_until(Paused)
        assert Path(f"/proc/{trainer.process.pid}/oom_score_adj").read_text().strip() == "1000"
        trainer.send(Stop())
        assert trainer.receive_until()[-1] == Stopped(0)
        assert trainer.process.wait(30) == 0


@pytest.mark.slow
def test_a_killed_trainer_resumes_to_the_same_adapter(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """Killed once between checkpoints and once as soon as one is reported; with a limit of memory
    into which its steps fit."""
    settings = recipe(num_epochs=2, checkpoint_steps=4)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reports = train_here(open_order(base, data, whole, recipe=settings))
    sizes = [report.num_tokens for report in of_kind(reports, Trained)]
    num_tokens = list(accumulate(sizes, initial=0))
    order = open_order(base, data, killed, recipe=settings, max_memory_bytes=16 << 30)
    with TrainerProcess(order) as trainer:
        while not (isinstance(report := trainer.receive(), Trained) and report.step >= 6):
            pass
    with TrainerProcess(order) as trainer:
        reports = trainer.receive_until(Checkpointed)
        ready = of_kind(reports, Ready)[0]
        assert ready.first_step >= 4
        assert ready.num_tokens == num_tokens[ready.first_step]
        assert isinstance(reports[-1], Checkpointed)
    reports = train(order)
    ready = of_kind(reports, Ready)[0]
    assert ready.first_step >= 8
    assert ready.num_tokens == num_tokens[ready.first_step]
    assert isinstance(reports[-1], Finished)
    expected, found = ((folder / "result" / WEIGHTS).read_bytes() for folder in (whole, killed))
    assert found == expected


@pytest.mark.slow
def test_a_wrong_line_is_reported_with_its_number(base: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines", [chat_line("a", "b"), {"messages": []}])
    (failed,) = train(open_order(base, lines, tmp_path))
    assert failed == Failed("invalid_training_data", "`messages` is empty", 2)


@pytest.mark.slow
def test_a_trainer_without_memory_says_so(base: Path, data: Path, tmp_path: Path) -> None:
    less_than_torch_takes = 560 << 20
    reports = train(open_order(base, data, tmp_path, max_memory_bytes=less_than_torch_takes))
    assert isinstance(reports[-1], Failed)
    assert reports[-1].code == "out_of_memory"


@pytest.mark.slow
def test_steps_that_may_not_fit_into_the_limit_are_not_begun(base: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "long", [chat_line("a" * 2_000, "b") for _ in range(256)])
    long = recipe(batch_size=256, max_tokens=512)
    order = open_order(base, lines, tmp_path, recipe=long, max_memory_bytes=1 << 31)
    (failed,) = train(order)
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_memory"
    assert "a step may need" in failed.message


@pytest.mark.slow
def test_a_trainer_ends_with_its_server(base: Path, data: Path, tmp_path: Path) -> None:
    with TrainerProcess(open_order(base, data, tmp_path)) as trainer:
        trainer.send(Pause())
        trainer.receive_until(Paused)
        trainer._socket.close()
        assert trainer.process.wait(30) == 0


def test_the_environment_has_no_secrets() -> None:
    server = {
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "LORAPLEX_DATABASE": "postgresql://u:s3cret@db/x",
        "LORAPLEX_BOOTSTRAP_KEY": "s3cret",
        "HTTPS_PROXY": "http://u:s3cret@proxy",
        "HF_TOKEN": "s3cret",
        "PATH": "/usr/bin",
        "LORAPLEX_LOG_LEVEL": "debug",
    }
    found = trainer_environment(server)
    assert "s3cret" not in str(found)
    assert found["PATH"] == "/usr/bin"
    assert found["LORAPLEX_LOG_LEVEL"] == "debug"
    assert found["HF_HUB_OFFLINE"] == "1"


def test_what_the_process_needs_before_it_is_confined_imports_no_torch() -> None:
    code = "import loraplex.engine.tuning.process, sys; sys.exit('torch' in sys.modules)"
    environment = trainer_environment(os.environ)
    assert subprocess.run([sys.executable, "-P", "-c", code], env=environment).returncode == 0
