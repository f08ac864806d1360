"""Durable disk operations: names that survive a crash, and space that is allocated in advance."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Write the directory itself to the disk: the names in it, not the files."""
    _sync(directory)


def sync_tree(directory: Path) -> None:
    """Write the directory and all that is below it to the disk, but not what its links lead to."""
    for path in directory.rglob("*"):
        if not path.is_symlink():
            _sync(path)
    _sync(directory)


def write_whole(path: Path, content: bytes) -> None:
    """Write the file, in place of a former one. A crash leaves the former content or the new one.

    It is written under the name `NAME.new` first. Raises OSError.
    """
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_bytes(content)
    _sync(unfinished)
    unfinished.replace(path)
    sync_directory(path.parent)


def make_directories(directory: Path, *, mode: int) -> None:
    """Create a directory and its missing parents, and make their names durable."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    # Another process may have created this one and not synced its name yet.
    if os.access(directory.parent, os.W_OK):
        sync_directory(directory.parent)
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
