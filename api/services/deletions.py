"""Adapters on their way out: hidden at once, then gone from every tier, with a receipt.

A deletion goes on if its caller goes away or the engine or store is down for a while; what was not
finished when the server stopped is finished after the next start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import structlog

from ...adapters.errors import AdapterError
from ...adapters.failpoints import failpoint
from ...adapters.fetcher_client import FetcherClient
from ...adapters.identity import AdapterKey
from ...adapters.store import ObjectStore, object_key
from ...engine.client import EngineClient
from ...engine.errors import EngineError
from ...platform.adapters import repository, service
from ...platform.adapters.service import Deletion
from ...platform.adapters.states import VersionState
from ...platform.audit.event import Changed, Event, Origin
from ...platform.base import JsonObject
from ...platform.errors import PlatformError
from ...platform.sessions import TenantSession
from ..control_plane import ControlPlane
from ..threads import WorkerThreads

log = structlog.get_logger(__name__)

NUM_THREADS = 2
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0
DRAIN_SECONDS = 30.0
"""How long requests that run under a version may go on once it is deleted, by default."""


@dataclass(frozen=True, slots=True)
class Removal:
    """A deletion that has ended, and what its receipt says."""

    deletion: Deletion
    receipt: JsonObject


class Deletions:
    """Removes versions; one for the server."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        fetcher: FetcherClient,
        store: ObjectStore,
        control_plane: ControlPlane,
    ) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._store = store
        self._control_plane = control_plane
        self._threads = WorkerThreads("deletions", NUM_THREADS)
        self._running: set[asyncio.Task[Removal]] = set()

    async def delete_adapter(
        self, tenant_id: str, name: str, origin: Origin, *, drain_seconds: float = DRAIN_SECONDS
    ) -> list[Removal]:
        """Remove all versions; returns when nothing is left. Raises AdapterNotFound.

        Running requests have `drain_seconds` to end; then they end with `adapter_deleted`.
        """

        def begin(session: TenantSession) -> Changed[list[Deletion]]:
            begun = service.begin_adapter_deletion(session, name)
            numbers = [deletion.number for deletion in begun]
            return Changed(begun, Event("adapter.delete", name, {"versions": numbers}))

        deletions = await self._control_plane.change(tenant_id, origin, begin)
        return await self._finish_all(deletions, drain_seconds)

    async def delete_version(
        self,
        tenant_id: str,
        name: str,
        number: int,
        origin: Origin,
        *,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> Removal:
        """Remove one version; returns when nothing is left.

        Raises AdapterNotFound, VersionNotFound or VersionAliased.
        """

        def begin(session: TenantSession) -> Changed[Deletion]:
            begun = service.begin_version_deletion(session, name, number)
            return Changed(begun, Event("version.delete", f"{name}@{number}"))

        deletion = await self._control_plane.change(tenant_id, origin, begin)
        (removal,) = await self._finish_all([deletion], drain_seconds)
        return removal

    async def recover(self) -> None:
        """Go on with what an earlier run began; what ran then does not run any more."""
        unfinished = await self._control_plane.read_all_tenants(
            repository.list_unfinished_versions_of_all_tenants
        )
        for version in unfinished:
            if version.state is VersionState.DELETING:
                self._begin(await self._resume(version.tenant_id, version.id), drain_seconds=0.0)

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

    async def _finish_all(
        self, deletions: Sequence[Deletion], drain_seconds: float
    ) -> list[Removal]:
        failpoint("deletions.begun")
        tasks = [self._begin(deletion, drain_seconds) for deletion in deletions]
        return await asyncio.shield(asyncio.gather(*tasks))

    def _begin(self, deletion: Deletion, drain_seconds: float) -> asyncio.Task[Removal]:
        task = asyncio.create_task(self._finish(deletion, drain_seconds))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _finish(self, deletion: Deletion, drain_seconds: float) -> Removal:
        """Evict, remove and write it down, again and again until it is done."""
        pause = FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + drain_seconds
        while True:
            try:
                return await self._remove(deletion, max(0.0, deadline - time.monotonic()))
            except (EngineError, AdapterError, PlatformError) as exc:
                log.warning("deletion_delayed", version_id=deletion.version_id, error=str(exc))
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _remove(self, deletion: Deletion, drain_seconds: float) -> Removal:
        key = deletion.key
        receipt: JsonObject = {"is_content_shared": deletion.is_content_shared}
        if not deletion.is_content_shared:
            receipt |= await self._remove_content(key, drain_seconds)
        await self._control_plane.write(
            key.tenant_id,
            lambda session: service.finish_deletion(session, deletion.version_id, receipt=receipt),
        )
        failpoint("deletions.finished")
        log.info("adapter_deleted", tenant_id=key.tenant_id, adapter_digest=key.digest)
        return Removal(deletion, receipt)

    async def _remove_content(self, key: AdapterKey, drain_seconds: float) -> JsonObject:
        """Take the content out of every tier; what each had to say."""
        evicted = await self._engine.evict_adapter(key, drain_seconds=drain_seconds)
        failpoint("deletions.evicted")
        await self._threads.run(self._fetcher.forget, key)
        failpoint("deletions.forgotten")
        await self._threads.run(self._store.delete, object_key(key))
        failpoint("deletions.removed")
        return {"engine": asdict(evicted), "disk": "removed", "object": object_key(key)}
