"""Where uploads lie until they are examined: one private folder, one file for each upload."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..threads import WorkerThreads

NUM_WRITERS = 4
WRITE_BYTES = 1 << 20


class Staging:
    """Files by upload id, which is the server's own and so safe in a path."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._threads = WorkerThreads("uploads", NUM_WRITERS)

    def weights_path(self, upload_id: str) -> Path:
        return self._directory / f"{upload_id}.safetensors"

    def config_path(self, upload_id: str) -> Path:
        return self._directory / f"{upload_id}.json"

    def block_path(self, upload_id: str) -> Path:
        return self._directory / f"{upload_id}.block"

    async def append(self, upload_id: str, offset: int, chunks: AsyncIterator[bytes]) -> None:
        """Write the chunks from `offset` on and make them durable.

        If `chunks` raises, what came before is durable all the same. Returns nothing: what is
        durable is the file's size, see `num_bytes`.
        """
        file = await self._threads.run(_open_at, self.weights_path(upload_id), offset)
        buffer = bytearray()
        writing: asyncio.Future[None] | None = None
        try:
            async for chunk in chunks:
                buffer += chunk
                if len(buffer) >= WRITE_BYTES:
                    piece = bytes(buffer)
                    buffer.clear()  # now: a piece that fails or goes on alone is not written twice
                    writing = self._threads.run(_write_all, file, piece)
                    await asyncio.shield(writing)
        finally:
            if writing is not None:
                await asyncio.wait([writing])  # cancelling the request does not stop its thread
            await self._threads.run(_finish, file, bytes(buffer))

    def num_bytes(self, upload_id: str) -> int:
        """How many bytes of the weights are here."""
        path = self.weights_path(upload_id)
        return path.stat().st_size if path.exists() else 0

    def sha256(self, upload_id: str) -> str:
        with self.weights_path(upload_id).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def discard(self, upload_id: str) -> None:
        """Delete what is left of an upload."""
        for path in (self.weights_path, self.config_path, self.block_path):
            path(upload_id).unlink(missing_ok=True)

    def list_uploads(self, before: datetime) -> set[str]:
        """The ids of uploads of which files lie here, none of them touched since `before`."""
        touched: dict[str, float] = {}
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # discarded meanwhile
                latest = touched.get(path.stem, 0.0)
                touched[path.stem] = max(latest, path.stat().st_mtime)
        return {upload_id for upload_id, at in touched.items() if at <= before.timestamp()}

    def close(self) -> None:
        self._threads.close()


def _open_at(path: Path, offset: int) -> int:
    """A descriptor at `offset`; what lies behind it was never acknowledged and goes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _finish(descriptor: int, data: bytes) -> None:
    try:
        _write_all(descriptor, data)
    finally:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
