"""The trainer processes of a server, found from outside."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MODULE = b"loraplex.engine.tuning.process"


def trainers_of(server_pid: int) -> list[int]:
    """The process ids of its trainers."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return [int(child) for child in children if _is_trainer(child)]


def _is_trainer(pid: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return MODULE in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
