"""The child processes of a server, as Linux lists them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Command lines by process id, of all that began in a process."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for child in (task / "children").read_text().split():
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().decode()
                found |= descendants(int(child))
    return found


@contextmanager
def killing(pid: int, name: str) -> Iterator[list[int]]:
    """Kill what this process starts and whose command line has `name`; which they were."""
    killed: list[int] = []
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.005):
            for child, line in descendants(pid).items():
                if name in line and child not in killed:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                        killed.append(child)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        is_over.set()
        killer.join()
