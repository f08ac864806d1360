"""Child processes that end with this process, even if it is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

_WATCH = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGTERM)
    except ProcessLookupError:
        pass
"""


class Leader(Protocol):
    """A process that leads its group."""

    @property
    def pid(self) -> int: ...


@contextmanager
def ending_with_this_process(process: Leader) -> Iterator[None]:
    """Within the block, the process group that `process` leads ends with this process."""
    _tell(f"+{process.pid}")
    try:
        yield
    finally:
        _tell(f"-{process.pid}")


def _tell(line: str) -> None:
    pipe = _watcher().stdin
    assert pipe is not None
    pipe.write(line.encode() + b"\n")
    pipe.flush()


@cache
def _watcher() -> subprocess.Popen[bytes]:
    """Its input stays open for as long as this process lives."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
