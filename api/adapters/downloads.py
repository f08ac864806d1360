"""Downloads of adapters: PEFT's two files, restored from the stored block."""

from __future__ import annotations

import base64
import hashlib
import mmap
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from ...adapters.disk_room import DiskRoom, full_disk_told
from ...adapters.errors import AdapterUnavailable, ObjectCorrupt, ObjectNotFound
from ...adapters.export import run_export
from ...adapters.identity import AdapterKey
from ...engine.process.adapter_fetches import FetchedBlock
from ..control_plane.tenant_threads import AsyncTenantThreads

NUM_EXPORTERS = 2
"""Concurrent exports, of different tenants."""
PIECE_BYTES = 1 << 20
MAX_ATTEMPTS = 3
"""The disk cache may drop a block before it is read."""


class ExportedFile:
    """An open file without a name, so that nothing has to be deleted later. It is sent from a
    memory map, so this process copies no bytes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size_bytes = len(self._mapped)
        self._sha256 = hashlib.sha256(self._mapped).digest()

    @property
    def repr_digest(self) -> str:
        """The file's SHA-256 as RFC 9530 writes it."""
        return f"sha-256=:{base64.b64encode(self._sha256).decode()}:"

    async def pieces(self) -> AsyncIterator[memoryview]:
        """The whole content in pieces. The memory of a piece is released when the next one is
        requested."""
        with memoryview(self._mapped) as view:
            for start in range(0, self.size_bytes, PIECE_BYTES):
                with view[start : start + PIECE_BYTES] as piece:
                    yield piece

    def close(self) -> None:
        """Close the file; data that the connection has not sent yet keeps it open until then."""
        del self._mapped


class Downloads:
    """Exports versions; one for the server, and `directory` is its own."""

    def __init__(
        self,
        directory: Path,
        fetch_block: Callable[[AdapterKey], Awaitable[FetchedBlock]],
        room: DiskRoom | None = None,
    ) -> None:
        """`fetch_block` fetches a block to the local disk, or raises. `room`: the disk's."""
        shutil.rmtree(directory, ignore_errors=True)  # remains of a crash
        directory.mkdir(mode=0o700, parents=True)
        self._directory = directory
        self._room = DiskRoom(directory) if room is None else room
        self._fetch_block = fetch_block
        self._threads = AsyncTenantThreads("exports", NUM_EXPORTERS)

    async def export(
        self, key: AdapterKey, name: str, *, base_model_name: str | None = None
    ) -> ExportedFile:
        """The file `name` of this content. `base_model_name` is the trainer's name of the base.

        Raises AdapterUnavailable, StorageFull, or an error of the store.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                block = await self._fetch_block(key)
                return await self._threads.run(
                    key.tenant_id, self._export, block.path, name, base_model_name
                )
            except FileNotFoundError:
                continue
            except (ObjectNotFound, ObjectCorrupt, OSError) as exc:
                raise AdapterUnavailable("The adapter's files could not be recreated.") from exc
        raise AdapterUnavailable(
            "The adapter was evicted from this machine's disk during the download."
        )

    def close(self) -> None:
        self._threads.close()

    def _export(self, block: Path, name: str, base_model_name: str | None) -> ExportedFile:
        self._room.check(block.stat().st_size)
        with full_disk_told(), tempfile.TemporaryDirectory(dir=self._directory) as directory:
            run_export(block, Path(directory), base_model_name=base_model_name)
            return ExportedFile(Path(directory) / name)
