"""A test server ends with the test run, even if the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.waiting import wait_for

START_AND_DIE = """
import os, signal, subprocess
from support.orphans import ending_with_this_process
for number in range(2):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, **silent)
    context = ending_with_this_process(child)
    context.__enter__()
    print(child.pid, flush=True)
    if number == 0:
        context.__exit__(None, None, None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_only_what_still_runs_for_a_killed_process_ends_with_it() -> None:
    tests = str(Path(__file__).parent)
    killed = subprocess.run(
        [sys.executable, "-c", START_AND_DIE],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    released, left = map(int, killed.stdout.split())
    try:
        wait_for(lambda: not is_running(left), seconds=30)
        assert is_running(released)
    finally:
        os.kill(released, signal.SIGKILL)
