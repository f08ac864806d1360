"""The memory of the trainer processes of this server, while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...engine.memory.host_memory import status_bytes


class TrainerMemory(msgspec.Struct, frozen=True):
    """One trainer's."""

    job_id: str
    tenant_id: str
    adapter: str
    """The adapter of which the result becomes a version."""
    resident_bytes: int
    step_bytes: int
    """The most that a step takes beside the base, by the trainer's estimate; 0: the base and the
    data are not loaded yet."""


@dataclass(slots=True)
class _Running:
    pid: int | None
    tenant_id: str
    adapter: str
    step_bytes: int = 0


class TrainerMemories:
    """By job; one per server."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def add(self, job_id: str, *, pid: int | None, tenant_id: str, adapter: str) -> None:
        """A trainer has begun. `pid`: None if it is on another machine, whose memory it takes."""
        self._running[job_id] = _Running(pid, tenant_id, adapter)

    def note_step(self, job_id: str, step_bytes: int) -> None:
        """It has estimated its steps."""
        self._running[job_id].step_bytes = step_bytes

    def remove(self, job_id: str) -> None:
        """It has ended."""
        del self._running[job_id]

    def measure(self) -> Sequence[TrainerMemory]:
        """What the trainers hold now. One that has just ended, and on a system without `/proc` any,
        holds nothing."""
        return [
            TrainerMemory(
                job_id, each.tenant_id, each.adapter, _resident_bytes(each.pid), each.step_bytes
            )
            for job_id, each in self._running.items()
        ]


def _resident_bytes(pid: int | None) -> int:
    if pid is None:
        return 0
    try:
        return status_bytes(Path(f"/proc/{pid}/status"), "VmRSS")
    except (OSError, StopIteration):  # a process that has ended has no such line
        return 0
