"""Adapters on their way back to their owners: PEFT's two files, made anew from the stored block."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from ...adapters.errors import AdapterUnavailable, ObjectCorrupt, ObjectNotFound
from ...adapters.export import export_adapter
from ...adapters.identity import AdapterKey
from ...engine.client import FetchedBlock
from ..threads import WorkerThreads

NUM_EXPORTERS = 2
PIECE_BYTES = 1 << 20
MAX_ATTEMPTS = 3
"""The disk cache may drop a block before it is read."""


class ExportedFile:
    """One file, open; its name is gone already, so that nothing has to be tidied up behind it."""

    def __init__(self, descriptor: int, threads: WorkerThreads) -> None:
        self._file = os.fdopen(descriptor, "rb")
        self._threads = threads
        self.size_bytes = os.fstat(descriptor).st_size
        self._sha256 = hashlib.file_digest(self._file, "sha256").digest()
        self._file.seek(0)

    @property
    def repr_digest(self) -> str:
        """The file's SHA-256 as RFC 9530 writes it."""
        return f"sha-256=:{base64.b64encode(self._sha256).decode()}:"

    async def pieces(self) -> AsyncIterator[bytes]:
        """The whole content."""
        with self._file:
            while piece := await self._threads.run(self._file.read, PIECE_BYTES):
                yield piece


class Downloads:
    """Exports versions; one for the server, and `directory` is its own."""

    def __init__(
        self, directory: Path, fetch_block: Callable[[AdapterKey], Awaitable[FetchedBlock]]
    ) -> None:
        """`fetch_block` brings a block to this machine's disk, or raises."""
        shutil.rmtree(directory, ignore_errors=True)  # what a crash left
        directory.mkdir(mode=0o700, parents=True)
        self._directory = directory
        self._fetch_block = fetch_block
        self._threads = WorkerThreads("exports", NUM_EXPORTERS)

    async def export(
        self, key: AdapterKey, name: str, *, base_model_name: str | None = None
    ) -> ExportedFile:
        """The file `name` of this content, trained on the base that its trainer called so.

        Raises AdapterUnavailable, or as the store does.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                block = await self._fetch_block(key)
                return await self._threads.run(self._export, block.path, name, base_model_name)
            except FileNotFoundError:
                continue
            except (ObjectNotFound, ObjectCorrupt, OSError) as exc:
                raise AdapterUnavailable("The adapter's files could not be made again.") from exc
        raise AdapterUnavailable("This machine's disk does not hold the adapter for long enough.")

    def close(self) -> None:
        self._threads.close()

    def _export(self, block: Path, name: str, base_model_name: str | None) -> ExportedFile:
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            export_adapter(block, Path(directory), base_model_name=base_model_name)
            descriptor = os.open(Path(directory) / name, os.O_RDONLY)
            return ExportedFile(descriptor, self._threads)
