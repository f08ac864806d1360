"""Durable disk operations: names that survive a crash, and space that is allocated in advance."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Write the directory itself to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file durably. After a crash it has its old content or the new one."""
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_directory(path.parent)


def make_directories(directory: Path, *, mode: int) -> None:
    """Create a directory and its missing parents, and make their names durable."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(mode=mode, exist_ok=True)
        sync_directory(path.parent)


def take_room(descriptor: int, num_bytes: int) -> None:
    """Extend the file to at least this size, with allocated disk space. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    missing = num_bytes - os.fstat(descriptor).st_size
    os.pwrite(descriptor, bytes(missing), num_bytes - missing)
