"""Adapters on their way out: hidden at once, then gone from every tier, with a receipt.

A deletion goes on if its caller goes away or the engine or store is down for a while; what was not
finished when the server stopped is finished after the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from ...adapters.errors import AdapterError
from ...adapters.fetcher import BlockSource
from ...adapters.store import ObjectStore, object_key
from ...engine.client import EngineClient
from ...engine.errors import EngineError
from ...platform.adapters import repository, service
from ...platform.adapters.service import Deletion
from ...platform.adapters.states import VersionState
from ...platform.errors import PlatformError
from ..control_plane import ControlPlane
from ..threads import WorkerThreads

log = structlog.get_logger(__name__)

NUM_THREADS = 2
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0


class Deletions:
    """Removes versions; one for the server."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        fetcher: BlockSource,
        store: ObjectStore,
        control_plane: ControlPlane,
    ) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._store = store
        self._control_plane = control_plane
        self._threads = WorkerThreads("deletions", NUM_THREADS)
        self._running: set[asyncio.Task[None]] = set()

    async def delete_adapter(self, tenant_id: str, name: str) -> list[Deletion]:
        """Remove all versions; returns when nothing is left. Raises AdapterNotFound."""
        deletions = await self._control_plane.write(
            tenant_id, lambda session: service.begin_adapter_deletion(session, name)
        )
        await self._finish_all(deletions)
        return deletions

    async def delete_version(self, tenant_id: str, name: str, number: int) -> Deletion:
        """Remove one version; returns when nothing is left.

        Raises AdapterNotFound, VersionNotFound or VersionAliased.
        """
        deletion = await self._control_plane.write(
            tenant_id, lambda session: service.begin_version_deletion(session, name, number)
        )
        await self._finish_all([deletion])
        return deletion

    async def recover(self) -> None:
        """Go on with what an earlier run began."""
        unfinished = await self._control_plane.read_all_tenants(
            repository.list_unfinished_versions_of_all_tenants
        )
        for version in unfinished:
            if version.state is VersionState.DELETING:
                self._begin(await self._resume(version.tenant_id, version.id))

    async def close(self) -> None:
        """Stop; what is not finished is taken up by the next `recover`."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.close()

    async def _resume(self, tenant_id: str, version_id: str) -> Deletion:
        return await self._control_plane.write(
            tenant_id, lambda session: service.resume_deletion(session, version_id)
        )

    async def _finish_all(self, deletions: Sequence[Deletion]) -> None:
        tasks = [self._begin(deletion) for deletion in deletions]
        await asyncio.shield(asyncio.gather(*tasks))

    def _begin(self, deletion: Deletion) -> asyncio.Task[None]:
        task = asyncio.create_task(self._finish(deletion))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _finish(self, deletion: Deletion) -> None:
        """Evict, remove and write it down, again and again until it is done."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._remove(deletion)
            except (EngineError, AdapterError, PlatformError) as exc:
                log.warning("deletion_delayed", version_id=deletion.version_id, error=str(exc))
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _remove(self, deletion: Deletion) -> None:
        key = deletion.key
        if not deletion.is_content_shared:
            await self._engine.evict_adapter(key)
            await self._threads.run(self._fetcher.forget, key)
            await self._threads.run(self._store.delete, object_key(key))
        await self._control_plane.write(
            key.tenant_id, lambda session: service.finish_deletion(session, deletion.version_id)
        )
        log.info("adapter_deleted", tenant_id=key.tenant_id, adapter_digest=key.digest)
