"""An adapter's files in a folder: checked and hashed before anything is sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..local.adapter_folder import AdapterFolder, FolderUnusable, read_adapter_folder
from .errors import InvalidAdapter


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter to push."""

    folder: AdapterFolder
    size_bytes: int
    """Of the weights, as `sha256`."""
    sha256: str


def read_adapter(path: Path) -> LocalAdapter:
    """Check the folder and hash its weights. Raises InvalidAdapter, saying the way out."""
    try:
        folder = read_adapter_folder(path)
    except FolderUnusable as exc:
        raise InvalidAdapter(str(exc)) from exc
    with folder.weights.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return LocalAdapter(folder, folder.weights.stat().st_size, sha256)
