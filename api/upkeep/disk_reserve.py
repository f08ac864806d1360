"""A file that reserves a part of the disk for the database.

Uploads, stored adapters and cached copies leave a reserve free (`DiskRoom`), but other programs on
the same disk, such as loggers, do not. Therefore a part of the reserve is allocated in a file,
which shrinks when the disk is full. So keys can be created and a server can start on a full disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from ...adapters.disk_room import DiskRoom, DiskSize, disk_size
from ...adapters.durable import take_room
from ..control_plane.periodic import Periodic
from ..control_plane.threads import WorkerThreads

log = structlog.get_logger(__name__)

FILE = "reserve"
"""In the data folder."""
MAX_FILE_BYTES = 16 << 20
RESERVE_PARTS = 4
"""The file is this fraction of the reserve (one in this number)."""
FREE_PARTS = 4
"""The file shrinks when less than this fraction of it (one in this number) is free."""
LOOK_SECONDS = 2.0


class DiskReserve:
    """Keeps the file; one for the server."""

    def __init__(
        self,
        path: Path,
        reserve_bytes: int,
        *,
        measure: Callable[[Path], DiskSize] = disk_size,
    ) -> None:
        """`reserve_bytes`: the complete reserve, of which the file holds a part."""
        self._path = path
        self._measure = measure
        self._reserve_bytes = reserve_bytes
        self._full_bytes = min(MAX_FILE_BYTES, reserve_bytes // RESERVE_PARTS)
        self._threads = WorkerThreads("disk-reserve", 1)
        self._looks = Periodic(
            partial(self._threads.run, self.keep),
            seconds=LOOK_SECONDS,
            log=log,
            failed="disk_reserve_not_kept",
            delayed_by=OSError,
        )

    def keep(self) -> None:
        """Give bytes back if the disk is full, take them again if it is not. Raises OSError."""
        held_bytes = self._path.stat().st_size if self._path.exists() else 0
        free_bytes = self._measure(self._path.parent).free
        lacking_bytes = self._full_bytes // FREE_PARTS - free_bytes
        if lacking_bytes > 0 and held_bytes:
            left_bytes = max(0, held_bytes - lacking_bytes)
            os.truncate(self._path, left_bytes)
            log.error("disk_full", free_bytes=free_bytes, reserve_file_bytes=left_bytes)
        elif held_bytes < self._full_bytes and free_bytes > self._reserve_bytes:
            self._grow()

    def start(self) -> None:
        self._looks.start()

    async def close(self) -> None:
        await self._looks.close()
        self._threads.close()

    def _grow(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take_room(descriptor, self._full_bytes)
        finally:
            os.close(descriptor)


def open_reserve(data_dir: Path, reserve_bytes: int | None) -> tuple[DiskReserve, DiskRoom]:
    """The data folder's reserve, maintained from now on, and the room outside it. Raises
    OSError."""
    room = DiskRoom(data_dir, reserve_bytes, reserve_file=data_dir / FILE)
    reserve = DiskReserve(data_dir / FILE, room.reserve_bytes)
    reserve.keep()
    return reserve, room
