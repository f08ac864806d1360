"""Lowers the priority of processes that must yield the processor to the engine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROCESS_NICENESS = 10


def yield_processor(pid: int) -> None:
    """Lower the priority of a process that leads a session of its own.

    Where Linux schedules each session as a group (autogrouping), its processes' niceness counts
    among themselves alone, and what counts among sessions is the group's own: see sched(7). The
    group is left as it is if the process has ended, or if another group's was set within 0.1 s.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, PROCESS_NICENESS)
        Path(f"/proc/{pid}/autogroup").write_text(str(PROCESS_NICENESS))
