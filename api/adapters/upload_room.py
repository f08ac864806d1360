"""Room for uploads on this server's disk, and how it is freed.

If the disk is short, the cheapest files are deleted first: files of uploads that have ended, cached
copies of stored adapters, then the uploads that received no data for an hour, oldest first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import structlog

from ...adapters.errors import AdapterError, StorageFull
from ...platform.adapters import staged, uploads
from ...platform.adapters.staged import StagedUpload
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.base import utc_now
from ...platform.sessions import PlatformSession, TenantSession
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic
from ..control_plane.threads import WorkerThreads
from .staging import Staging
from .staging_budget import Hold, StagingBudget

log = structlog.get_logger(__name__)

SILENCE = timedelta(hours=1)
"""An upload that received no data for this long may be abandoned for others."""
REFRESH_SECONDS = 60.0


class UploadRoom:
    """Keeps the budget consistent with the database and the disk; one per server."""

    def __init__(
        self,
        *,
        budget: StagingBudget,
        staging: Staging,
        control_plane: ControlPlane,
        server_id: str,
        trim_cache: Callable[[int], int] = lambda num_bytes: 0,
    ) -> None:
        """`trim_cache` evicts copies of stored adapters; it may raise an AdapterError."""
        self.budget = budget
        self._staging = staging
        self._control_plane = control_plane
        self._server_id = server_id
        self._trim_cache = trim_cache
        self._threads = WorkerThreads("upload-room", 1)
        self._making = asyncio.Lock()
        self._receiving: set[str] = set()
        """The uploads that are being received now."""
        self._refreshes = Periodic(
            self.refresh, seconds=REFRESH_SECONDS, log=log, failed="upload_room_not_refreshed"
        )

    async def refresh(self) -> Sequence[StagedUpload]:
        """Reserve room for the unfinished uploads in the database, and return them; release all
        others.

        Upkeep jobs, and tenants that call another server, may end this server's uploads.
        """
        held = self.budget.held_ids

        def read(session: PlatformSession) -> tuple[Sequence[StagedUpload], Sequence[str]]:
            return staged.list_staged(session, self._server_id), staged.list_closed(session, held)

        unfinished, closed = await self._control_plane.read_all_tenants(read)
        self.budget.restore(Hold(each.id, each.tenant_id, each.num_bytes) for each in unfinished)
        for upload_id in closed:
            await self._threads.run(self.release, upload_id)
        return unfinished

    @contextmanager
    def receiving(self, upload_id: str) -> Iterator[None]:
        """An upload that is being received is not deleted, even if its last acknowledged bytes are
        old."""
        self._receiving.add(upload_id)
        try:
            yield
        finally:
            self._receiving.discard(upload_id)

    async def prepare(self, hold: Hold, num_bytes: int) -> None:
        """Reserve room for an upload, and make it for the next bytes. Raises StorageFull or a
        PlatformError."""
        self.budget.restore([hold])
        if self.budget.lacking_to_receive(num_bytes) and not await self.make(
            lambda: self.budget.lacking_to_receive(num_bytes)
        ):
            raise StorageFull

    async def make(self, lacking_bytes: Callable[[], int]) -> bool:
        """Delete the cheapest files until enough is free; False if that is impossible. Raises a
        PlatformError."""
        async with self._making:
            unfinished = await self.refresh()
            if (lacking := lacking_bytes()) > 0:
                await self._trim(lacking)
            for upload in _silent(unfinished):
                if lacking_bytes() <= 0:
                    break
                if upload.id not in self._receiving:
                    await self._abandon(upload)
        lacking = lacking_bytes()
        if lacking > 0:
            log.warning("storage_full", lacking_bytes=lacking, held_bytes=self.budget.held_bytes)
        return lacking <= 0

    def release(self, upload_id: str) -> None:
        """Delete the files of an upload that has ended."""
        self._staging.discard(upload_id)
        self.budget.release(upload_id)

    def start(self) -> None:
        self._refreshes.start()

    async def close(self) -> None:
        await self._refreshes.close()
        self._threads.close()

    async def _trim(self, num_bytes: int) -> None:
        try:
            freed_bytes = await self._threads.run(self._trim_cache, num_bytes)
        except AdapterError as exc:
            log.warning("disk_cache_not_trimmed", error=str(exc))
        else:
            log.info("disk_cache_trimmed", lacking_bytes=num_bytes, freed_bytes=freed_bytes)

    async def _abandon(self, upload: StagedUpload) -> None:
        older_than = utc_now() - SILENCE

        def abandon(session: TenantSession) -> Changed[bool]:
            is_silent = uploads.abandon_if_stale(session, upload.id, older_than)
            details = {"adapter": upload.adapter_name, "reason": "storage_full"}
            event = Event("upload.abandon", upload.id, details)
            return Changed(is_silent, event if is_silent else None)

        if await self._control_plane.change(upload.tenant_id, BY_SYSTEM, abandon):
            await self._threads.run(self.release, upload.id)
            log.warning("upload_given_up", upload_id=upload.id, num_bytes=upload.num_bytes)


def _silent(unfinished: Sequence[StagedUpload]) -> list[StagedUpload]:
    latest = utc_now() - SILENCE
    return [upload for upload in unfinished if upload.updated_at < latest]
