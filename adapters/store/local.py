"""The embedded object store: a local folder that only its owner can read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..disk_room import DiskRoom, full_disk_told
from ..durable import make_directories, sync_directory
from ..errors import ObjectNotFound, StoreUnavailable
from ..wiping import read_pieces, write_all
from .base import (
    READ_BYTES,
    OnProgress,
    StoredObject,
    check_key,
    check_prefix,
    write_verified,
)

_INCOMING = ".incoming"
_ABANDONED_AFTER_SECONDS = 60.0
"""Files that are older than this at a start and not locked were left by a killed process. Another
server that shares the folder may be about to lock a younger file."""


class LocalStore:
    """Objects as files below one directory. See `ObjectStore` for the contract.

    An object appears under its name only after its bytes are on the disk. `put_file` raises
    StorageFull rather than take the disk's reserve.
    """

    def __init__(
        self,
        directory: Path,
        *,
        reserve_bytes: int | None = None,
        reserve_file: Path | None = None,
    ) -> None:
        """`reserve_bytes` and `reserve_file`: see `DiskRoom`."""
        self._directory = directory
        self._incoming = directory / _INCOMING
        with _reported():
            self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            self._room = DiskRoom(directory, reserve_bytes, reserve_file=reserve_file)
        self.remove_abandoned(older_than_seconds=_ABANDONED_AFTER_SECONDS)

    def put_file(
        self, key: str, path: Path, *, sha256: str, on_progress: OnProgress | None = None
    ) -> None:
        target = self._path(key)
        with _reported(), path.open("rb", buffering=0) as source:
            self._room.check(os.fstat(source.fileno()).st_size)
            make_directories(target.parent, mode=0o700)
            copy = _durable_copy(source, self._incoming, on_progress)
            copy.replace(target)
            sync_directory(target.parent)

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        with contextlib.ExitStack() as stack:
            with _reported():
                source = stack.enter_context(self._path(key).open("rb", buffering=0))
            chunks = read_pieces(source, READ_BYTES)
            write_verified(chunks, path, sha256=sha256, size_bytes=size_bytes, deadline=deadline)

    def delete(self, key: str) -> None:
        with _reported():
            self._path(key).unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def list_keys(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        folder, _, _ = check_prefix(prefix).rpartition("/")
        for path in _files_in_order(self._directory / folder, self._directory, after):
            key = path.relative_to(self._directory).as_posix()
            if key <= after or not key.startswith(prefix):
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = path.stat()
                yield StoredObject(key, status.st_size, status.st_mtime)

    def remove_abandoned(self, *, older_than_seconds: float) -> int:
        oldest = time.time() - older_than_seconds
        num_removed = 0
        with _reported():
            for path in self._incoming.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process's, just finished
                    if path.stat().st_mtime < oldest:
                        num_removed += _remove_unless_held(path)
        return num_removed

    def _path(self, key: str) -> Path:
        return self._directory / check_key(key)


def _remove_unless_held(path: Path) -> bool:
    """Remove a file under a temporary name unless the process that writes it lives."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
        return True


def _durable_copy(source: BinaryIO, directory: Path, on_progress: OnProgress | None) -> Path:
    """A private copy under a temporary name, its bytes on the disk."""
    with tempfile.NamedTemporaryFile(dir=directory, delete=False, buffering=0) as copy:
        fcntl.flock(copy, fcntl.LOCK_EX)  # until it is closed: the sweep leaves it alone
        try:
            for piece in read_pieces(source):
                write_all(copy, piece)
                if on_progress:
                    on_progress(copy.tell())
            os.fsync(copy.fileno())
        except BaseException:
            os.unlink(copy.name)
            raise
    return Path(copy.name)


def _files_in_order(directory: Path, root: Path, after: str) -> Iterator[Path]:
    """The visible files below a directory in the order of their keys; folders before `after` are
    not looked into.
    """
    try:
        with _reported(), os.scandir(directory) as listing:
            entries = [(e.is_dir(follow_symlinks=False), e.path, e.name) for e in listing]
    except ObjectNotFound:
        return
    # A folder's name is followed by a slash in the keys, and "-" and "." sort before it.
    for is_directory, path, name in sorted(entries, key=lambda e: e[2] + "/" * e[0]):
        if name.startswith("."):
            continue
        if not is_directory:
            yield Path(path)
        elif (folder := Path(path).relative_to(root).as_posix() + "/") > after[: len(folder)]:
            yield from _files_in_order(Path(path), root, "")
        elif after.startswith(folder):
            yield from _files_in_order(Path(path), root, after)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn the system's errors into the store's."""
    try:
        with full_disk_told():
            yield
    except FileNotFoundError as exc:
        raise ObjectNotFound() from exc
    except OSError as exc:
        raise StoreUnavailable(f"the adapter store's folder failed: {exc.strerror}") from exc
