"""What a program brings to the disk, which no test can see in the files themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def record_synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that `os.fsync` is called for from now on, by their names then."""
    synced: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return synced
