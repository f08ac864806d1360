"""The files of checkpoints. Their names tell the step and the SHA-256 of the content.

A file is written under a temporary name, brought to the disk, and renamed. A file that was damaged
later is found by its digest. Needs no torch: the server stores these files and lays them down.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from ...adapters.durable import sync_directory
from ...adapters.wiping import file_digest

NUM_KEPT = 2
"""Checkpoints of a run: if the newest one is damaged, the one before it serves."""
_NAME = re.compile(r"step-(\d{1,12})-([0-9a-f]{64})\.safetensors")


class CheckpointFile(NamedTuple):
    """A file with a checkpoint's name."""

    step: int
    sha256: str
    """Of its content, hexadecimal."""
    path: Path

    @property
    def is_whole(self) -> bool:
        """It has the content that its name tells. Reads it once. Raises OSError."""
        return bool(file_digest(self.path).hexdigest() == self.sha256)


def checkpoint_path(folder: Path, step: int, sha256: str) -> Path:
    """Where a checkpoint of this content lies."""
    return folder / f"step-{step}-{sha256}.safetensors"


def list_checkpoints(folder: Path) -> list[CheckpointFile]:
    """The regular files with a checkpoint's name, by descending step; whether they are whole is not
    checked."""
    found = [
        CheckpointFile(int(match[1]), match[2], path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and stat.S_ISREG(path.lstat().st_mode)
    ]
    return sorted(found, reverse=True)


def newest_whole(folder: Path) -> CheckpointFile | None:
    """The newest one that is whole. Newer ones, which are damaged, are removed."""
    for checkpoint in list_checkpoints(folder):
        if checkpoint.is_whole:
            return checkpoint
        checkpoint.path.unlink()
    return None


def publish_checkpoint(unfinished: Path, folder: Path, step: int) -> CheckpointFile:
    """Bring a complete file to the disk, give it its name in the folder, and remove the files
    before the last two."""
    sha256 = file_digest(unfinished).hexdigest()
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    path = checkpoint_path(folder, step, sha256)
    unfinished.rename(path)
    sync_directory(folder)
    for old in list_checkpoints(folder)[NUM_KEPT:]:
        old.path.unlink()
    return CheckpointFile(step, sha256, path)
