"""Locks the data folder for one server: two would delete each other's uploads and cached blocks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "lock"


class DataDirInUse(Exception):
    """Another server runs on this data folder."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(f"Another server uses {data_dir}: stop it, or use another --data-dir.")


@contextmanager
def locked_data_dir(data_dir: Path) -> Iterator[None]:
    """Lock the folder until the block is left. Raises DataDirInUse if another server holds it.

    The system releases the lock when this process ends, however it ends. Commands that use the
    database while a server runs do not take it.
    """
    # Not inheritable: a child that outlives the server for a moment must not hold the folder.
    descriptor = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirInUse(data_dir) from None
        yield
    finally:
        os.close(descriptor)
