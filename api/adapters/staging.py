"""The files of unfinished uploads: one private folder, one file per upload."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ...adapters.disk_room import DiskRoom, full_disk_told
from ...adapters.durable import make_directories, sync_directory
from ...adapters.wiping import file_digest
from ..control_plane.tenant_threads import AsyncTenantThreads

NUM_WRITERS = 4


class Staging:
    """Files by upload id, which is the server's own and so safe in a path."""

    def __init__(self, directory: Path, room: DiskRoom | None = None) -> None:
        """`room`: of the folder's disk; by default with the default reserve."""
        make_directories(directory, mode=0o700)
        self._directory = directory
        self.room = DiskRoom(directory) if room is None else room
        self._threads = AsyncTenantThreads("uploads", NUM_WRITERS)

    def weights_path(self, upload_id: str) -> Path:
        return self._directory / f"{upload_id}.safetensors"

    def config_path(self, upload_id: str) -> Path:
        return self._directory / f"{upload_id}.json"

    def block_path(self, upload_id: str) -> Path:
        return self._directory / f"{upload_id}.block"

    def part_path(self, upload_id: str) -> Path:
        """The bytes of one request, on their way to the store."""
        return self._directory / f"{upload_id}.part"

    def fetched_path(self, upload_id: str) -> Path:
        """A part that was fetched from the store."""
        return self._directory / f"{upload_id}.fetched"

    async def append(
        self, tenant_id: str, upload_id: str, offset: int, chunks: AsyncIterator[bytes]
    ) -> None:
        """Write the chunks from `offset` on and make them durable.

        If `chunks` raises, the earlier chunks are durable all the same. The file's size
        (`num_bytes`) is the durable amount. Raises StorageFull.
        """
        with full_disk_told():
            await self._append(tenant_id, self.weights_path(upload_id), offset, chunks)

    async def write_part(
        self, tenant_id: str, upload_id: str, chunks: AsyncIterator[bytes]
    ) -> None:
        """Write the chunks to the file of the part; the same otherwise."""
        with full_disk_told():
            await self._append(tenant_id, self.part_path(upload_id), 0, chunks)

    async def _append(
        self, tenant_id: str, path: Path, offset: int, chunks: AsyncIterator[bytes]
    ) -> None:
        file = await self._threads.run(tenant_id, _open_at, path, offset)
        try:
            async for chunk in chunks:
                await self._write(tenant_id, file, chunk)
        finally:
            await self._threads.run(tenant_id, _finish, file, path.parent)

    async def _write(self, tenant_id: str, file: int, chunk: bytes) -> None:
        self.room.check(len(chunk))
        writing = self._threads.run(tenant_id, _write_all, file, chunk)
        try:
            await asyncio.shield(writing)
        finally:
            await asyncio.wait([writing])  # cancelling the request does not stop its thread

    def num_bytes(self, upload_id: str) -> int:
        """The number of stored bytes of the weights; 0 if they were deleted meanwhile."""
        try:
            return self.weights_path(upload_id).stat().st_size
        except FileNotFoundError:
            return 0

    def sha256(self, upload_id: str) -> str:
        digest: str = file_digest(self.weights_path(upload_id)).hexdigest()
        return digest

    def discard(self, upload_id: str) -> None:
        """Delete the remaining files of an upload."""
        self.weights_path(upload_id).unlink(missing_ok=True)
        self.discard_block(upload_id)

    def discard_block(self, upload_id: str) -> None:
        """Delete the block written by its examination, and parts on their way."""
        for path in (self.config_path, self.block_path, self.part_path, self.fetched_path):
            path(upload_id).unlink(missing_ok=True)

    def list_uploads(self, before: datetime) -> set[str]:
        """The ids of uploads with files here, none of them modified since `before`."""
        touched: dict[str, float] = {}
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # discarded meanwhile
                latest = touched.get(path.stem, 0.0)
                touched[path.stem] = max(latest, path.stat().st_mtime)
        return {upload_id for upload_id, at in touched.items() if at <= before.timestamp()}

    def close(self) -> None:
        self._threads.close()


def _open_at(path: Path, offset: int) -> int:
    """A descriptor at `offset`; later bytes were never acknowledged and are removed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _finish(descriptor: int, directory: Path) -> None:
    """Make the file and its name durable. Another process may have created it and been killed."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(directory)
