"""Servers of this user are found while they run, and not afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.api.server.running_servers import RunningServer, list_running_servers, registered

SERVER = RunningServer("http://127.0.0.1:8000", "/srv/data", has_embedded_database=True)
HOLD = """
import sys
from loraplex.api.server.running_servers import RunningServer, registered
with registered(RunningServer("http://127.0.0.1:9", "/gone", has_embedded_database=False)):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "loraplex"


def start_holder() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", HOLD]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_server_is_found_while_it_runs() -> None:
    assert list_running_servers() == []
    with registered(SERVER):
        assert list_running_servers() == [SERVER]
    assert list_running_servers() == []


def test_what_a_killed_server_left_is_not_found_and_removed(runtime_folder: Path) -> None:
    with start_holder() as holder:
        assert [server.data_dir for server in list_running_servers()] == ["/gone"]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert list_running_servers() == []
    assert list(runtime_folder.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_not_believed(runtime_folder: Path) -> None:
    with registered(SERVER):
        runtime_folder.chmod(0o777)
        assert list_running_servers() == []


def test_a_server_runs_where_no_folder_can_be_made(runtime_folder: Path) -> None:
    runtime_folder.write_text("a file")
    with registered(SERVER):
        assert list_running_servers() == []
