"""Checkpoints in the object store, so that another server goes on with a job whose server is lost.

A checkpoint is one object, named by its id and the SHA-256 of its content, by which it is verified
when it is read. An object is written before the row that names it, and removed after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from ...adapters.disk_room import DiskRoom, full_disk_told
from ...adapters.durable import sync_directory
from ...adapters.errors import AdapterError, ObjectCorrupt, ObjectNotFound
from ...adapters.store import ObjectStore, checkpoint_key
from ...engine.tuning.checkpoint_files import CheckpointFile, checkpoint_path, newest_whole
from ...platform.base import utc_now
from ...platform.tuning import stored_checkpoints
from ...platform.tuning.models import StoredCheckpoint, TuningJob
from ..control_plane.control_plane import ControlPlane
from ..control_plane.tenant_threads import AsyncTenantThreads
from .work_folders import WorkFolder

log = structlog.get_logger(__name__)

NUM_THREADS = 2


class CheckpointStore:
    """Stores, lays down and removes checkpoints; one for the server."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        control_plane: ControlPlane,
        room: DiskRoom,
        server_id: str,
        runtime_id: str,
    ) -> None:
        """`runtime_id`: of the base as this server serves it."""
        self._store = store
        self._control_plane = control_plane
        self._room = room
        self._server_id = server_id
        self._runtime_id = runtime_id
        self._threads = AsyncTenantThreads("checkpoints", NUM_THREADS)

    def close(self) -> None:
        self._threads.close()

    async def put(self, job: TuningJob, file: CheckpointFile) -> None:
        """Store a checkpoint unless it is stored already, and remove the job's older ones of this
        runtime. It is dropped if the job has ended or is another server's. Raises QuotaExceeded,
        another PlatformError, an AdapterError or OSError."""
        runtime_id = self._runtime_id
        look = partial(
            stored_checkpoints.is_stored,
            job_id=job.id,
            sha256=file.sha256,
            runtime_id=runtime_id,
        )
        if await self._control_plane.read(job.tenant_id, look):
            return
        checkpoint = StoredCheckpoint(
            id=stored_checkpoints.new_checkpoint_id(),
            job_id=job.id,
            step=file.step,
            sha256=file.sha256,
            size_bytes=file.path.stat().st_size,
            runtime_id=runtime_id,
            created_at=utc_now(),
        )
        check = partial(
            stored_checkpoints.check_room,
            job_id=job.id,
            size_bytes=checkpoint.size_bytes,
            runtime_id=runtime_id,
        )
        await self._control_plane.write(job.tenant_id, check)
        key = checkpoint_key(job.tenant_id, checkpoint.id, checkpoint.sha256)
        with full_disk_told():
            await self._threads.run(
                job.tenant_id, self._store.put_file, key, file.path, sha256=file.sha256
            )
        add = partial(stored_checkpoints.add, checkpoint=checkpoint, server_id=self._server_id)
        needless = await self._control_plane.write(job.tenant_id, add)
        await self._remove_objects((job.tenant_id, each.id, each.sha256) for each in needless)

    async def lay(self, job: TuningJob, folder: WorkFolder) -> None:
        """Lay the newest stored checkpoint into the job's folder, unless that has one which is as
        new. A damaged one is removed, and the one before it is laid. Raises a PlatformError, an
        AdapterError or OSError."""
        here = await asyncio.to_thread(newest_whole, folder.checkpoints)
        find = partial(stored_checkpoints.list_newest, job_id=job.id, runtime_id=self._runtime_id)
        for checkpoint in await self._control_plane.read(job.tenant_id, find):
            if here is not None and here.step >= checkpoint.step:
                return
            try:
                await self._fetch(checkpoint, folder)
                return
            except (ObjectCorrupt, ObjectNotFound) as exc:
                log.warning("checkpoint_damaged", job=job.id, error=str(exc))
            remove = partial(stored_checkpoints.remove_damaged, checkpoint_id=checkpoint.id)
            await self._control_plane.write(job.tenant_id, remove)
            await self._remove_objects([(job.tenant_id, checkpoint.id, checkpoint.sha256)])

    async def remove_needless(self) -> None:
        """Remove checkpoints of jobs that have ended. Raises a PlatformError."""
        control_plane = self._control_plane
        # Servers look every second: writing would lock SQLite each time.
        if not await control_plane.read_all_tenants(stored_checkpoints.has_needless):
            return
        needless = await control_plane.write_all_tenants(stored_checkpoints.take_needless)
        await self._remove_objects((each.tenant_id, each.id, each.sha256) for each in needless)

    async def _fetch(self, checkpoint: StoredCheckpoint, folder: WorkFolder) -> None:
        await asyncio.to_thread(self._room.check, checkpoint.size_bytes)
        with full_disk_told():
            await self._threads.run(
                checkpoint.tenant_id,
                self._store.fetch_file,
                checkpoint_key(checkpoint.tenant_id, checkpoint.id, checkpoint.sha256),
                folder.incoming,
                sha256=checkpoint.sha256,
                size_bytes=checkpoint.size_bytes,
            )
        path = checkpoint_path(folder.checkpoints, checkpoint.step, checkpoint.sha256)
        await asyncio.to_thread(_publish, folder.incoming, path)

    async def _remove_objects(self, named: Iterable[tuple[str, str, str]]) -> None:
        """Of these tenants, ids and digests. What fails is left to a garbage collection."""
        for tenant_id, checkpoint_id, sha256 in named:
            key = checkpoint_key(tenant_id, checkpoint_id, sha256)
            with suppress(AdapterError):
                await self._threads.run(tenant_id, self._store.delete, key)


def _publish(incoming: Path, path: Path) -> None:
    """Give a whole file its name, for good."""
    incoming.rename(path)
    sync_directory(path.parent)
