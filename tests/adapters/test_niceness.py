"""Low-priority child processes have a lower priority than the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.adapters.child import start_child
from loraplex.adapters.niceness import PROCESS_NICENESS, yield_processor
from support.waiting import wait_for


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are scheduled as groups on Linux")
def test_a_child_yields_within_its_session_and_among_sessions() -> None:
    with open(os.devnull, "r+b") as nothing:
        child = start_child("timeit", stdin=nothing, stdout=nothing, stderr=nothing)
    group = Path(f"/proc/{child.pid}/autogroup")

    def is_group_nice() -> bool:
        yield_processor(child.pid)  # again: another group may have been set within 0.1 s
        return group.read_text().endswith(f"nice {PROCESS_NICENESS}\n")

    try:
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == PROCESS_NICENESS
        if os.access(group, os.W_OK):
            wait_for(is_group_nice)
    finally:
        child.kill()
        child.wait()


def test_a_child_that_has_ended_is_left_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    yield_processor(child.pid)
