"""Garbage collection: unreferenced objects, expired files, batches, fine-tuning jobs and responses,
abandoned uploads.

A crash between two effects leaves bytes without a row, never a row without bytes: objects are
written before the version that names them, and removed before the deletion completes. So garbage is
found by listing the bytes. Recent bytes may belong to a running push and are kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog

from ...adapters.failpoints import failpoint
from ...adapters.identity import AdapterKey
from ...adapters.store import (
    ObjectStore,
    StoredObject,
    adapter_key,
    checkpoint_key,
    checkpoint_of_key,
    file_key,
    file_of_key,
    object_key,
    part_key,
    part_of_key,
)
from ...adapters.store.base import OBJECT_PREFIX
from ...platform.adapters import repository, service, uploads, wishes
from ...platform.adapters.models import Upload
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.base import utc_now
from ...platform.batches import files
from ...platform.batches import service as batches
from ...platform.batches.file_models import StoredFile
from ...platform.errors import PlatformError
from ...platform.evaluations import golden_sets
from ...platform.evaluations import service as evaluations
from ...platform.responses import service as responses
from ...platform.sessions import PlatformSession, TenantSession
from ...platform.tuning import service as tuning
from ...platform.tuning import stored_checkpoints
from ..adapters.staging import Staging
from ..control_plane.background_loop import BackgroundLoop
from ..control_plane.control_plane import ControlPlane
from ..control_plane.threads import WorkerThreads

log = structlog.get_logger(__name__)

GRACE_SECONDS = 24 * 3600.0
"""Younger bytes are left alone: longer than any push takes from its first effect to its last."""
UPLOAD_PATIENCE_SECONDS = 7 * 24 * 3600.0
"""An upload that received no data for this long is abandoned."""
FIRST_SECONDS = 600.0
INTERVAL_SECONDS = 24 * 3600.0


@dataclass(slots=True)
class Collected:
    """The result of one collection; with `dry_run` nothing was removed."""

    dry_run: bool
    num_objects: int = 0
    """Bytes in the store before the collection."""
    removed_objects: list[str] = field(default_factory=list)
    removed_bytes: int = 0
    abandoned_uploads: list[str] = field(default_factory=list)
    removed_files: list[str] = field(default_factory=list)
    """Files of uploads that have ended."""
    expired_files: list[str] = field(default_factory=list)
    """Tenants' files whose time had come."""
    expired_responses: int = 0
    """Stored responses whose time had come."""
    abandoned_transfers: int = 0
    """Unfinished transfers from this server to the store."""


class Garbage:
    """Collects garbage; one per server, which collects its own files daily, and one for the
    command.

    The server with the lease collects the shared database and store.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        staging: Staging,
        control_plane: ControlPlane,
        grace_seconds: float = GRACE_SECONDS,
        upload_patience_seconds: float = UPLOAD_PATIENCE_SECONDS,
        batch_days: int = 30,
    ) -> None:
        """`batch_days`: how long ended batches, fine-tuning jobs and evaluations are kept."""
        self._store = store
        self._staging = staging
        self._control_plane = control_plane
        self._grace = timedelta(seconds=grace_seconds)
        self._upload_patience = timedelta(seconds=upload_patience_seconds)
        self._batch_age = timedelta(days=batch_days)
        self._threads = WorkerThreads("garbage", 1)
        self._loop = BackgroundLoop(self._run)

    def start(self) -> None:
        self._loop.start()

    async def close(self) -> None:
        await self._loop.close()
        self._threads.close()

    async def collect(self, *, dry_run: bool = False) -> Collected:
        """One collection. Raises an AdapterError or PlatformError; completed work is kept."""
        collected = Collected(dry_run)
        await self._collect_shared(collected)
        await self._remove_files(collected, self._grace)
        return collected

    async def collect_shared(self) -> None:
        """Collect the shared database and store, for all servers. Raises as `collect`."""
        collected = Collected(dry_run=False)
        await self._collect_shared(collected)
        log.info(
            "garbage_collected",
            objects=len(collected.removed_objects),
            bytes=collected.removed_bytes,
            uploads=len(collected.abandoned_uploads),
            expired_files=len(collected.expired_files),
            expired_responses=collected.expired_responses,
        )

    async def sweep(self) -> None:
        """The files of this server's own uploads. Raises a PlatformError."""
        await self._sweep(self._grace)

    async def sweep_at_start(self) -> None:
        """The same at start, before any upload is received: files that no upload needs were left by
        a killed server. Call it while the data folder is locked. Raises a PlatformError."""
        await self._sweep(timedelta(0))

    async def _sweep(self, grace: timedelta) -> None:
        collected = Collected(dry_run=False)
        await self._remove_files(collected, grace)
        log.info("uploads_swept", files=len(collected.removed_files))

    async def _collect_shared(self, collected: Collected) -> None:
        await self._abandon_uploads(collected)
        await self._expire_files(collected)
        await self._expire_responses(collected)
        await self._remove_objects(collected)
        if not collected.dry_run:
            collected.abandoned_transfers = await self._threads.run(
                self._store.remove_abandoned, older_than_seconds=self._grace.total_seconds()
            )

    async def _abandon_uploads(self, collected: Collected) -> None:
        older_than = utc_now() - self._upload_patience
        stale = await self._control_plane.read_all_tenants(
            lambda session: repository.list_stale_uploads_of_all_tenants(session, older_than)
        )
        if collected.dry_run:
            collected.abandoned_uploads = [upload.id for upload in stale]
            return
        for upload in stale:
            if await self._abandon(upload, older_than):
                collected.abandoned_uploads.append(upload.id)
        await self._control_plane.write_all_tenants(
            lambda session: wishes.remove_expired(session, utc_now())
        )
        failpoint("garbage.abandoned")

    async def _abandon(self, upload: Upload, older_than: datetime) -> bool:
        def abandon(session: TenantSession) -> Changed[bool]:
            is_stale = uploads.abandon_if_stale(session, upload.id, older_than)
            event = Event("upload.abandon", upload.id, {"adapter": upload.adapter_name})
            return Changed(is_stale, event if is_stale else None)

        return await self._control_plane.change(upload.tenant_id, BY_SYSTEM, abandon)

    async def _expire_files(self, collected: Collected) -> None:
        """Remove expired files that nothing uses, and batches, fine-tuning jobs and evaluations
        that ended long ago."""
        now = utc_now()

        def find(session: PlatformSession) -> list[StoredFile]:
            needed = set[str]().union(
                *(
                    each.list_needed_files_of_all_tenants(session)
                    for each in (tuning, golden_sets, evaluations)
                )
            )
            expired = files.list_expired_of_all_tenants(session, now)
            return [file for file in expired if file.id not in needed]

        expired = await self._control_plane.read_all_tenants(find)
        collected.expired_files = [file.id for file in expired]
        if collected.dry_run:
            return
        for file in expired:
            await self._control_plane.change(file.tenant_id, BY_SYSTEM, partial(_expire, file.id))
            key = file_key(file.tenant_id, file.id, file.sha256)
            await self._threads.run(self._store.delete, key)
        for purge in (batches.purge, tuning.purge, evaluations.purge):
            ended_long_ago = partial(purge, before=now - self._batch_age)
            while await self._control_plane.write_all_tenants(ended_long_ago):
                pass

    async def _expire_responses(self, collected: Collected) -> None:
        now = utc_now()
        if collected.dry_run:
            collected.expired_responses = await self._control_plane.read_all_tenants(
                lambda session: responses.count_expired_of_all_tenants(session, now)
            )
            return
        while num_removed := await self._control_plane.write_all_tenants(
            lambda session: responses.purge(session, now)
        ):
            collected.expired_responses += num_removed

    async def _remove_files(self, collected: Collected, grace: timedelta) -> None:
        """Files of uploads that neither receive nor are examined."""
        found = await self._threads.run(self._staging.list_uploads, utc_now() - grace)
        unfinished = await self._control_plane.read_all_tenants(
            repository.list_unfinished_uploads_of_all_tenants
        )
        needed = {upload.id for upload in unfinished}
        collected.removed_files = sorted(found - needed)
        if not collected.dry_run:
            for upload_id in collected.removed_files:
                await self._threads.run(self._staging.discard, upload_id)

    async def _remove_objects(self, collected: Collected) -> None:
        young = utc_now() - self._grace
        listed = await self._threads.run(self._list_objects)
        collected.num_objects = len(listed)
        failpoint("garbage.listed")
        named = await self._control_plane.read_all_tenants(
            repository.list_stored_contents_of_all_tenants
        )
        names = {object_key(key) for key in named}
        for list_names in (_names_of_files, _names_of_parts, _names_of_checkpoints):
            names |= await self._control_plane.read_all_tenants(list_names)
        for stored in listed:
            if stored.key in names or stored.modified_at > young.timestamp():
                continue
            if await self._is_unnamed(stored.key):
                await self._remove_object(stored, collected)

    def _list_objects(self) -> list[StoredObject]:
        return list(self._store.list_keys(OBJECT_PREFIX))

    async def _is_unnamed(self, object_key: str) -> bool:
        """Whether the object is of a version, a file, a checkpoint or a part, and still none has
        this name."""
        if key := adapter_key(object_key):
            return not await self._control_plane.read(
                key.tenant_id, lambda session: service.is_object_referenced(session, key.digest)
            )
        if found := file_of_key(object_key):
            tenant_id, file_id = found
            return not await self._control_plane.read(
                tenant_id, lambda session: files.exists(session, file_id)
            )
        if checkpoint := checkpoint_of_key(object_key):
            tenant_id, checkpoint_id = checkpoint
            return not await self._control_plane.read(
                tenant_id, lambda session: stored_checkpoints.exists(session, checkpoint_id)
            )
        if part := part_of_key(object_key):
            tenant_id, upload_id, part_id = part
            return not await self._control_plane.read(
                tenant_id, lambda session: uploads.has_part(session, upload_id, part_id)
            )
        return False

    async def _remove_object(self, stored: StoredObject, collected: Collected) -> None:
        if not collected.dry_run:
            if not await self._delete(stored.key):
                return
            failpoint("garbage.removed")
        collected.removed_objects.append(stored.key)
        collected.removed_bytes += stored.size_bytes

    async def _delete(self, stored_key: str) -> bool:
        """False if the object is a version's by now. Only the content of a version can come back:
        the other keys have ids that are never given again."""
        key = adapter_key(stored_key)
        if key is None:
            await self._threads.run(self._store.delete, stored_key)
            return True
        await self._threads.run(self._store.exists, stored_key)  # an outage shows without the lock
        return await self._control_plane.write(
            key.tenant_id, lambda session: self._delete_unreferenced(session, key)
        )

    def _delete_unreferenced(self, session: TenantSession, key: AdapterKey) -> bool:
        if not service.lock_unreferenced(session, key.digest):
            return False
        self._store.delete(object_key(key))
        return True

    async def _run(self) -> None:
        pause = FIRST_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = INTERVAL_SECONDS
            try:
                await self.sweep()
            except PlatformError as exc:
                pause = FIRST_SECONDS
                log.warning("uploads_not_swept", error=str(exc))
            except Exception:  # a defect in one sweep must not stop the next ones
                log.exception("uploads_not_swept")


def _expire(file_id: str, session: TenantSession) -> Changed[None]:
    is_removed = files.remove_expired(session, file_id)
    return Changed(None, Event("file.expire", file_id) if is_removed else None)


def _names_of_files(session: PlatformSession) -> set[str]:
    stored = files.list_stored_of_all_tenants(session)
    return {file_key(file.tenant_id, file.id, file.sha256) for file in stored}


def _names_of_checkpoints(session: PlatformSession) -> set[str]:
    stored = stored_checkpoints.list_of_all_tenants(session)
    return {checkpoint_key(each.tenant_id, each.id, each.sha256) for each in stored}


def _names_of_parts(session: PlatformSession) -> set[str]:
    unfinished = repository.list_unfinished_uploads_of_all_tenants(session)
    return {
        part_key(upload.tenant_id, upload.id, part.id)
        for upload in unfinished
        for part in upload.stored_parts
    }
