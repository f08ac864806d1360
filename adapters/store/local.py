"""The embedded object store: a folder of this machine, readable by its owner only."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..durable import sync_directory
from ..errors import ObjectNotFound, StoreUnavailable
from .base import READ_BYTES, check_key, write_verified

_INCOMING = ".incoming"
_ABANDONED_AFTER_SECONDS = 24 * 3600


class LocalStore:
    """Objects as files below one directory. See `ObjectStore` for the contract.

    An object appears under its name only after its bytes are on the disk.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._incoming = directory / _INCOMING
        with _reported():
            self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            _remove_abandoned(self._incoming)

    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        target = self._path(key)
        with _reported(), path.open("rb") as source:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy = _durable_copy(source, self._incoming)
            copy.replace(target)
            sync_directory(target.parent)

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        with contextlib.ExitStack() as stack:
            with _reported():
                source = stack.enter_context(self._path(key).open("rb"))
            chunks = iter(lambda: source.read(READ_BYTES), b"")
            write_verified(chunks, path, sha256=sha256, size_bytes=size_bytes, deadline=deadline)

    def delete(self, key: str) -> None:
        with _reported():
            self._path(key).unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def _path(self, key: str) -> Path:
        return self._directory / check_key(key)


def _durable_copy(source: BinaryIO, directory: Path) -> Path:
    """A private copy under a temporary name, its bytes on the disk."""
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as copy:
        try:
            shutil.copyfileobj(source, copy, READ_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        except BaseException:
            os.unlink(copy.name)
            raise
    return Path(copy.name)


def _remove_abandoned(directory: Path) -> None:
    """Delete what a killed process left; a file another process still writes is younger."""
    now = time.time()
    for path in directory.iterdir():
        if now - path.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn the system's errors into the store's."""
    try:
        yield
    except FileNotFoundError as exc:
        raise ObjectNotFound() from exc
    except OSError as exc:
        raise StoreUnavailable(f"the adapter store's folder failed: {exc.strerror}") from exc
