"""Lowers the priority of processes that must yield the processor to the engine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROCESS_NICENESS = 10


def yield_processor(pid: int) -> None:
    """Lower the priority of a process that leads its own session.

    Where Linux schedules each session as a group (autogrouping), the niceness of its processes
    applies only within the group, and the group's own niceness applies between sessions: see
    sched(7). The group is left unchanged if the process has ended, or if another group's was set
    within 0.1 s.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, PROCESS_NICENESS)
        Path(f"/proc/{pid}/autogroup").write_text(str(PROCESS_NICENESS))
