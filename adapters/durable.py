"""Making names durable: a rename survives a crash once its directory has been written."""

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


def make_directories(directory: Path, *, mode: int) -> None:
    """Create a directory and its missing parents, and make their names durable."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(mode=mode, exist_ok=True)
        sync_directory(path.parent)
