"""Deletes adapters: hides them at once, removes them from every tier, and writes a receipt.

A deletion continues if the client disconnects or the engine or store is unavailable for a while. If
the server stops, the deletion is finished after the next start, or by another server. Each server
releases the deleted content; the server with the lease waits for all before it completes the
deletion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime

import structlog

from ...adapters.errors import AdapterError
from ...adapters.failpoints import failpoint
from ...adapters.fetcher_client import FetcherClient
from ...adapters.store import ObjectStore, object_key
from ...engine.errors import EngineError
from ...engine.process.engine import Engine
from ...platform.adapters import repository, service
from ...platform.adapters.models import AdapterVersion
from ...platform.adapters.service import Deletion
from ...platform.adapters.states import VersionState
from ...platform.audit.event import Changed, Event, Origin
from ...platform.base import JsonObject
from ...platform.errors import InvalidTransition, PlatformError
from ...platform.evaluations import gates, golden_sets
from ...platform.evaluations import service as evaluations
from ...platform.jobs.service import shared_now
from ...platform.samples import service as samples
from ...platform.servers import service as servers
from ...platform.sessions import PlatformSession, TenantSession
from ...platform.tuning import service as tuning
from ..control_plane.control_plane import ControlPlane
from ..control_plane.leases import LeaseLost, Leases
from ..control_plane.periodic import Periodic
from ..control_plane.tenant_threads import AsyncTenantThreads

log = structlog.get_logger(__name__)

NUM_THREADS = 2
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0
WATCH_SECONDS = 3.0
"""How often a server looks for deletions by other servers."""
OTHERS_SECONDS = 0.5
DRAIN_SECONDS = 30.0
"""How long running requests of a deleted version may continue, by default."""


class Deletions:
    """Removes versions; one for the server."""

    def __init__(
        self,
        *,
        engine: Engine,
        fetcher: FetcherClient,
        store: ObjectStore,
        control_plane: ControlPlane,
        leases: Leases,
    ) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._store = store
        self._control_plane = control_plane
        self._threads = AsyncTenantThreads("deletions", NUM_THREADS)
        self._leases = leases
        self._running: dict[str, asyncio.Task[Deletion]] = {}
        """By version."""
        self._held: set[str] = set()
        """The versions whose deletion this server must finish."""
        self._let_go_of: set[str] = set()
        """Versions being deleted that this server has released in all tiers."""
        self._looks = Periodic(
            self.look,
            seconds=WATCH_SECONDS,
            log=log,
            failed="deletions_not_seen",
            delayed_by=(EngineError, AdapterError, PlatformError),
        )

    async def delete_adapter(
        self, tenant_id: str, name: str, origin: Origin, *, drain_seconds: float = DRAIN_SECONDS
    ) -> list[Deletion]:
        """Remove all versions, the adapter's golden sets and evaluations, and its fine-tuning jobs
        that have ended; returns when nothing is left. Raises AdapterNotFound.

        Running requests have `drain_seconds` to end; then they end with `adapter_deleted`.
        """

        def begin(session: TenantSession) -> Changed[list[Deletion]]:
            begun = service.begin_adapter_deletion(session, name, deleted_by=origin.actor.author)
            tuning.remove_ended(session, name)
            gates.remove_all(session, name)
            golden_sets.remove_all(session, name)
            evaluations.remove_all(session, name)
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
    ) -> Deletion:
        """Remove one version; returns when nothing is left.

        Raises AdapterNotFound, VersionNotFound or VersionAliased.
        """

        def begin(session: TenantSession) -> Changed[Deletion]:
            begun = service.begin_version_deletion(session, name, number)
            return Changed(begun, Event("version.delete", f"{name}@{number}"))

        deletion = await self._control_plane.change(tenant_id, origin, begin)
        (deletion,) = await self._finish_all([deletion], drain_seconds)
        return deletion

    async def recover(self) -> None:
        """Continue the deletions that an earlier run began; that run's requests no longer exist."""
        await self.look()
        self._looks.start()

    async def close(self) -> None:
        """Stop; the next `recover` or another server continues unfinished deletions."""
        await self._looks.close()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.close()

    async def look(self) -> None:
        """Release content that other servers delete, and take over abandoned deletions.

        Raises an EngineError, AdapterError or PlatformError; the next call continues.
        """
        now, deleting = await self._control_plane.read_all_tenants(_list_deleting)
        self._let_go_of &= {version.id for version in deleting}
        others = [version for version in deleting if version.id not in self._running]
        for version in others:
            with suppress(InvalidTransition):  # it is complete
                deletion = await self._resume(version.tenant_id, version.id)
                if version.id in self._running:  # a caller of this server has just started it
                    continue
                await self._let_go(deletion, DRAIN_SECONDS)
                if await self._leases.claim(_lease(deletion)):
                    self._begin(deletion, drain_seconds=0.0)
        settled = self._let_go_of | self._held
        if deleting and all(version.id in settled for version in deleting):
            await self._control_plane.write_all_tenants(
                lambda session: servers.note_evicted(session, self._leases.server_id, now)
            )

    async def _resume(self, tenant_id: str, version_id: str) -> Deletion:
        return await self._control_plane.read(
            tenant_id, lambda session: service.resume_deletion(session, version_id)
        )

    async def _finish_all(
        self, deletions: Sequence[Deletion], drain_seconds: float
    ) -> list[Deletion]:
        failpoint("deletions.begun")
        tasks = [self._begin(deletion, drain_seconds) for deletion in deletions]
        return await asyncio.shield(asyncio.gather(*tasks))

    def _begin(self, deletion: Deletion, drain_seconds: float) -> asyncio.Task[Deletion]:
        task = asyncio.create_task(self._finish(deletion, drain_seconds))
        self._running[deletion.version_id] = task
        task.add_done_callback(lambda _: self._running.pop(deletion.version_id, None))
        return task

    async def _finish(self, deletion: Deletion, drain_seconds: float) -> Deletion:
        """Run the deletion, and retry until it is complete, here or on another server."""
        pause = FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + drain_seconds
        while True:
            try:
                await self._try_to_finish(deletion, max(0.0, deadline - time.monotonic()))
                await self._resume(deletion.key.tenant_id, deletion.version_id)
            except InvalidTransition:
                return deletion
            except (EngineError, AdapterError, PlatformError, LeaseLost) as exc:
                log.warning("deletion_delayed", version_id=deletion.version_id, error=str(exc))
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _try_to_finish(self, deletion: Deletion, drain_seconds: float) -> None:
        """Run the whole deletion under the lease; without the lease, do only this server's part.

        Raises InvalidTransition once it is done.
        """
        if not await self._leases.claim(_lease(deletion)):
            await self._let_go(deletion, drain_seconds)
            return
        self._held.add(deletion.version_id)
        try:
            await self._leases.keep(_lease(deletion), self._remove(deletion, drain_seconds))
        finally:
            self._held.discard(deletion.version_id)
        await self._leases.forget(_lease(deletion))

    async def _remove(self, deletion: Deletion, drain_seconds: float) -> None:
        key = deletion.key
        receipt: JsonObject = {"is_content_shared": deletion.is_content_shared}
        if deletion.is_content_shared:
            self._engine.forget_outputs(key)
        else:
            receipt |= await self._remove_content(deletion, drain_seconds)

        def finish(session: TenantSession) -> None:
            removed = {**receipt, "samples": samples.erase_version(session, deletion.version_id)}
            service.finish_deletion(session, deletion.version_id, receipt=removed)

        await self._control_plane.write(key.tenant_id, finish)
        failpoint("deletions.finished")
        log.info("adapter_deleted", tenant_id=key.tenant_id, adapter_digest=key.digest)

    async def _remove_content(self, deletion: Deletion, drain_seconds: float) -> JsonObject:
        """Remove the content from every tier of every server; returns their reports.

        Raises InvalidTransition if another server has finished the deletion.
        """
        key = deletion.key
        begun_at = await self._control_plane.read_all_tenants(shared_now)
        evicted = await self._engine.evict_adapter(key, drain_seconds=drain_seconds)
        failpoint("deletions.evicted")
        await self._threads.run(key.tenant_id, self._fetcher.forget, key)
        failpoint("deletions.forgotten")
        await self._wait_for_others(begun_at)
        await self._remove_object(deletion)
        failpoint("deletions.removed")
        return {"engine": asdict(evicted), "disk": "removed", "object": object_key(key)}

    async def _remove_object(self, deletion: Deletion) -> None:
        """Remove the object while the deletion is known to be unfinished.

        This server may have lost the lease, and another one may have finished the deletion. The
        content may have been pushed again since. Raises InvalidTransition then.
        """
        tenant_id, stored_key = deletion.key.tenant_id, object_key(deletion.key)

        def remove(session: TenantSession) -> None:
            service.lock_deletion(session, deletion.version_id)
            self._store.delete(stored_key)

        # An outage of the store shows here, where no lock is held.
        await self._threads.run(tenant_id, self._store.exists, stored_key)
        await self._control_plane.write(tenant_id, remove)

    async def _wait_for_others(self, begun_at: datetime) -> None:
        """Wait until every other server has released the content or counts as stopped."""
        while True:
            holders = await self._control_plane.read_all_tenants(
                lambda session: servers.list_holders(session, begun_at)
            )
            if set(holders) <= {self._leases.server_id}:
                return
            await asyncio.sleep(OTHERS_SECONDS)

    async def _let_go(self, deletion: Deletion, drain_seconds: float) -> None:
        """Remove the content from this server's tiers; once for each deletion."""
        if deletion.version_id in self._let_go_of:
            return
        self._control_plane.note_change(deletion.key.tenant_id)  # no name resolves to it any more
        if deletion.is_content_shared:
            self._engine.forget_outputs(deletion.key)
        else:
            await self._engine.evict_adapter(deletion.key, drain_seconds=drain_seconds)
            tenant_id = deletion.key.tenant_id
            await self._threads.run(tenant_id, self._fetcher.forget, deletion.key)
        self._let_go_of.add(deletion.version_id)


def _lease(deletion: Deletion) -> str:
    return f"deletion:{deletion.version_id}"


def _list_deleting(session: PlatformSession) -> tuple[datetime, list[AdapterVersion]]:
    """The versions being deleted, and a time that is not later."""
    now = shared_now(session)
    unfinished = repository.list_unfinished_versions_of_all_tenants(session)
    return now, [each for each in unfinished if each.state is VersionState.DELETING]
