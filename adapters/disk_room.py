"""Free space on a disk, excluding the reserve for the database."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .errors import StorageFull

RESERVE_PART = 20
"""The reserve is this fraction of the disk (one in this number), within the bounds below."""
MIN_RESERVE_BYTES = 8 << 20
MAX_RESERVE_BYTES = 1 << 30


_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskSize(NamedTuple):
    """The current size of a file system, in bytes."""

    total: int
    free: int
    """For this process, without the part reserved for root."""


def disk_size(directory: Path) -> DiskSize:
    """The size of the file system that holds the directory. Raises OSError."""
    usage = shutil.disk_usage(directory)
    return DiskSize(usage.total, usage.free)


class DiskRoom:
    """The space on a directory's disk for uploads, stored adapters and cached copies.

    The rest is reserved for the database, so that keys, accounts and usage can be written when
    everything else is refused. A part of the reserve may be allocated in a file that shrinks when
    the disk is full nevertheless (`reserve_file`).
    """

    def __init__(
        self,
        directory: Path,
        reserve_bytes: int | None = None,
        *,
        reserve_file: Path | None = None,
        measure: Callable[[Path], DiskSize] = disk_size,
    ) -> None:
        """`reserve_bytes`: None is a twentieth of the disk, from 8 MiB to 1 GiB."""
        self._directory = directory
        self._measure = measure
        self._reserve_file = reserve_file
        self.total_bytes = measure(directory).total
        self.reserve_bytes = (
            default_reserve_bytes(self.total_bytes) if reserve_bytes is None else reserve_bytes
        )

    @property
    def free_bytes(self) -> int:
        """Free bytes without the reserve; negative if the reserve is in use."""
        kept_free = self.reserve_bytes - self._kept_in_file()
        return self._measure(self._directory).free - max(0, kept_free)

    def check(self, num_bytes: int) -> None:
        """Raise StorageFull unless this many bytes may be written."""
        if num_bytes > self.free_bytes:
            raise StorageFull

    def _kept_in_file(self) -> int:
        if self._reserve_file is None:
            return 0
        try:
            status = self._reserve_file.stat()
        except FileNotFoundError:
            return 0
        return status.st_size if status.st_dev == self._directory.stat().st_dev else 0


@contextmanager
def full_disk_told() -> Iterator[None]:
    """Raise StorageFull for the system's errors about a full disk or an exceeded quota."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise StorageFull from exc
        raise


def default_reserve_bytes(total_bytes: int) -> int:
    """The reserve on a disk of this size."""
    return min(max(total_bytes // RESERVE_PART, MIN_RESERVE_BYTES), MAX_RESERVE_BYTES)
