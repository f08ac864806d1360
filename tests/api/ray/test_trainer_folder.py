"""The folder of a trainer on a Ray node, and who removes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.api.ray.trainer_folder import TrainerFolder
from support.server import child_environment
from support.waiting import wait_for

OWNER = """
import sys, time
from pathlib import Path
from loraplex.api.ray.trainer_folder import TrainerFolder
folder = TrainerFolder(Path(sys.argv[1]))
folder.work.training_file.write_text("secret")
print(folder.work.path, flush=True)
time.sleep(600)
"""


def test_a_folder_is_the_users_alone_and_removed_when_it_is_closed(tmp_path: Path) -> None:
    folder = TrainerFolder(tmp_path / "trainers")
    assert folder.work.path.stat().st_mode & 0o777 == 0o700
    assert folder.work.checkpoints.is_dir()
    folder.close()
    wait_for(lambda: not folder.work.path.exists())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_folder_does_not_outlive_the_process_that_made_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    with owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert (path / "training.jsonl").read_text() == "secret"
        owner.send_signal(number)
    wait_for(lambda: not path.exists())


def test_what_a_lost_node_left_is_removed_and_running_trainers_keep_theirs(tmp_path: Path) -> None:
    running = TrainerFolder(tmp_path)
    left = tmp_path / "left"
    (left / "checkpoints").mkdir(parents=True)
    (left / "training.jsonl").write_text("secret")
    other = TrainerFolder(tmp_path)
    assert {running.work.path, other.work.path} == set(tmp_path.iterdir())
    for folder in (running, other):
        folder.close()
    wait_for(lambda: not list(tmp_path.iterdir()))
