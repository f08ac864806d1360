"""Tenants' files: received and sent through a private folder, kept in the object store.

Each file is an object of its own, named by its id and the SHA-256 of its content, by which it is
verified when it is read. An object is written before the row that names it, and removed after: a
crash in between leaves an object without a row, which a garbage collection removes.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from ...adapters.disk_room import DiskRoom, full_disk_told
from ...adapters.errors import AdapterError
from ...adapters.failpoints import failpoint
from ...adapters.store import ObjectStore, file_key
from ...platform.audit.event import Changed, Event, Origin
from ...platform.base import utc_now
from ...platform.batches import files
from ...platform.batches.file_models import FilePurpose, StoredFile
from ...platform.errors import QuotaExceeded
from ...platform.evaluations import golden_sets
from ...platform.evaluations import service as evaluations
from ...platform.keys.principal import Principal
from ...platform.sessions import TenantSession
from ...platform.tuning import service as tuning
from ..control_plane.control_plane import ControlPlane
from ..control_plane.tenant_threads import AsyncTenantThreads

NUM_THREADS = 2


class ReceivedFile:
    """An uploaded file, or one that was made here, on this machine."""

    def __init__(self, path: Path, filename: str, size_bytes: int, sha256: str) -> None:
        self.path = path
        self.filename = filename
        self.size_bytes = size_bytes
        self.sha256 = sha256


class TenantFiles:
    """Adds, fetches and deletes files; one for the server, and `directory` is its own."""

    def __init__(
        self,
        directory: Path,
        *,
        store: ObjectStore,
        control_plane: ControlPlane,
        room: DiskRoom,
        kept_for: timedelta,
    ) -> None:
        """`kept_for`: how long a file is kept that names no other time."""
        shutil.rmtree(directory, ignore_errors=True)  # remains of a crash
        directory.mkdir(mode=0o700, parents=True)
        self.kept_for = kept_for
        self._directory = directory
        self._store = store
        self._control_plane = control_plane
        self._room = room
        self._threads = AsyncTenantThreads("files", NUM_THREADS)

    def close(self) -> None:
        self._threads.close()

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A path for a file on this machine, which is deleted at the end."""
        path = self._directory / uuid.uuid4().hex
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def check_room(self, tenant_id: str, size_bytes: int) -> None:
        """Check that the tenant may have one more file of this size, and that it fits on the disk.

        Raises QuotaExceeded or StorageFull.
        """
        await self._control_plane.read(
            tenant_id, lambda session: files.check_room(session, size_bytes)
        )
        await asyncio.to_thread(self._room.check, size_bytes)

    async def add(
        self,
        principal: Principal,
        origin: Origin,
        received: ReceivedFile,
        purpose: FilePurpose,
        kept_for: timedelta | None,
        *,
        has_samples: bool = False,
    ) -> StoredFile:
        """Store a received file. Raises QuotaExceeded or an AdapterError."""
        now = utc_now()
        file = StoredFile(
            id=files.new_file_id(),
            key_id=principal.key_id,
            purpose=purpose,
            filename=received.filename,
            size_bytes=received.size_bytes,
            sha256=received.sha256,
            has_samples=has_samples,
            created_at=now,
            expires_at=now + (kept_for or self.kept_for),
        )
        await self.put(principal.tenant_id, file, received.path)
        failpoint("files.stored")

        def add(session: TenantSession) -> Changed[StoredFile]:
            files.add_upload(session, file)
            details = {"filename": file.filename, "bytes": file.size_bytes, "sha256": file.sha256}
            return Changed(file, Event("file.upload", file.id, details))

        try:
            return await self._control_plane.change(principal.tenant_id, origin, add)
        except QuotaExceeded:
            await self._remove_object(principal.tenant_id, file)
            raise

    async def put(self, tenant_id: str, file: StoredFile, path: Path) -> None:
        """Store the bytes of a file that has no row yet. May be repeated. Raises an
        AdapterError."""
        key = file_key(tenant_id, file.id, file.sha256)
        with full_disk_told():
            await self._threads.run(tenant_id, self._store.put_file, key, path, sha256=file.sha256)

    async def fetch(self, tenant_id: str, file: StoredFile, path: Path) -> None:
        """Write the verified bytes of a file to `path`. Raises an AdapterError."""
        await asyncio.to_thread(self._room.check, file.size_bytes)
        with full_disk_told():
            await self._threads.run(
                tenant_id,
                self._store.fetch_file,
                file_key(tenant_id, file.id, file.sha256),
                path,
                sha256=file.sha256,
                size_bytes=file.size_bytes,
            )

    async def delete(self, principal: Principal, origin: Origin, file_id: str) -> None:
        """Delete a file and its bytes. Raises FileNotFound, FileInUse or an AdapterError."""

        def remove(session: TenantSession) -> Changed[StoredFile]:
            for each in (tuning, golden_sets, evaluations):
                each.check_file_unused(session, file_id)
            file = files.remove(session, file_id, viewer=principal)
            return Changed(file, Event("file.delete", file.id, {"filename": file.filename}))

        file = await self._control_plane.change(principal.tenant_id, origin, remove)
        failpoint("files.removed")
        await self._remove_object(principal.tenant_id, file)

    async def _remove_object(self, tenant_id: str, file: StoredFile) -> None:
        key = file_key(tenant_id, file.id, file.sha256)
        with suppress(AdapterError):  # a garbage collection removes it
            await self._threads.run(tenant_id, self._store.delete, key)
