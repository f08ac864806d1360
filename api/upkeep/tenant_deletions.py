"""Deletes tenants: removes what they have in every tier, tells their webhooks, erases their rows.

A deletion continues if the client disconnects. If the server stops, another server or the next
start continues it. Each step may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

import structlog

from ...adapters.errors import AdapterError
from ...adapters.failpoints import failpoint
from ...adapters.store import ObjectStore, StoredObject
from ...adapters.store.base import OBJECT_PREFIX
from ...engine.errors import EngineError
from ...platform.adapters import uploads
from ...platform.audit.event import BY_SYSTEM, Changed, Event, Origin
from ...platform.base import utc_now
from ...platform.batches import service as batches
from ...platform.errors import AdapterNotFound, InvalidTransition, PlatformError
from ...platform.evaluations import service as evaluations
from ...platform.sessions import PlatformSession
from ...platform.tenants import deletion as service
from ...platform.tenants.models import TenantDeletion
from ...platform.tuning import service as tuning
from ..adapters.deletions import Deletions
from ..adapters.pushes import Pushes
from ..control_plane.control_plane import ControlPlane
from ..control_plane.leases import LeaseLost, Leases
from ..control_plane.periodic import Periodic
from ..control_plane.threads import WorkerThreads

log = structlog.get_logger(__name__)

WATCH_SECONDS = 3.0
"""How often a server looks for deletions that no other server works on."""
RETRY = timedelta(seconds=3)
QUIET = timedelta(seconds=5)
"""After this time every server refuses the tenant's keys."""
RECORDED = timedelta(seconds=20)
"""After this time every server has written its figures of the requests that ended before: some are
written every 15 seconds."""
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 30.0
"""How long batches and jobs may take to end, and webhooks to take their events."""
NUM_ADAPTERS = 16
"""Deleted at a time."""


class TenantDeletions:
    """Deletes tenants; one for the server."""

    def __init__(
        self,
        *,
        control_plane: ControlPlane,
        leases: Leases,
        deletions: Deletions,
        pushes: Pushes,
        store: ObjectStore,
    ) -> None:
        self._control_plane = control_plane
        self._leases = leases
        self._deletions = deletions
        self._pushes = pushes
        self._store = store
        self._threads = WorkerThreads("tenant-deletions", 1)
        self._running: dict[str, asyncio.Task[None]] = {}
        """By tenant."""
        self._looks = Periodic(
            self._look,
            seconds=WATCH_SECONDS,
            log=log,
            failed="tenant_deletions_not_seen",
            at_once=True,
        )

    def start(self) -> None:
        self._looks.start()

    async def close(self) -> None:
        """Stop; the next start or another server continues."""
        await self._looks.close()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.close()

    async def delete(self, slug: str, origin: Origin, *, with_usage: bool) -> TenantDeletion:
        """Hide the tenant; the rest happens in the background. May be repeated until it is done.

        Raises TenantNotFound.
        """

        def begin(session: PlatformSession) -> Changed[TenantDeletion]:
            known = service.find_unfinished(session, slug)
            if known is not None:
                return Changed(known, None)
            deletion = service.begin(session, slug, with_usage=with_usage)
            details = {"id": deletion.id, "with_usage": with_usage}
            return Changed(deletion, Event("tenant.delete", slug, details))

        deletion = await self._control_plane.change_platform(origin, begin)
        failpoint("tenants.hidden")
        with suppress(PlatformError):  # the next look begins it
            await self._look()
        return deletion

    async def _look(self) -> None:
        for deletion in await self._control_plane.read_all_tenants(service.list_unfinished):
            if deletion.id not in self._running and await self._leases.claim(_lease(deletion)):
                self._running[deletion.id] = asyncio.create_task(self._run(deletion))

    async def _run(self, deletion: TenantDeletion) -> None:
        bound = log.bind(tenant_id=deletion.id)
        try:
            await self._leases.keep(_lease(deletion), self._delete(deletion))
            await self._leases.forget(_lease(deletion))
            bound.info("tenant_deleted")
        except LeaseLost:
            bound.warning("tenant_deletion_taken_over")
        except (EngineError, AdapterError, PlatformError) as exc:
            bound.warning("tenant_deletion_delayed", error=str(exc))
        except Exception:  # a defect in one deletion must not stop the others
            bound.exception("tenant_deletion_failed")
        finally:
            del self._running[deletion.id]
            with suppress(PlatformError):  # it expires
                await self._leases.postpone(_lease(deletion), RETRY)

    async def _delete(self, deletion: TenantDeletion) -> None:
        await _sleep_until(deletion.requested_at + QUIET)
        failpoint("tenants.quiet")
        await self._end_work(deletion.id)
        await self._remove_adapters(deletion.id)
        await self._remove_objects(deletion.id)
        failpoint("tenants.emptied")
        await self._tell_webhooks(deletion.id)
        await _sleep_until(deletion.requested_at + RECORDED)
        await erase_rows(self._control_plane, deletion)
        failpoint("tenants.erased")
        await self._control_plane.change_platform(BY_SYSTEM, partial(_finish, deletion.id))
        failpoint("tenants.deleted")

    async def _end_work(self, tenant_id: str) -> None:
        """End evaluations, batches and fine-tuning jobs."""
        for each in (evaluations, batches, tuning):
            await self._control_plane.write(tenant_id, each.cancel_all)
            await _wait_for_end(partial(self._control_plane.read, tenant_id, each.has_open))

    async def _remove_adapters(self, tenant_id: str) -> None:
        """Remove them from every tier, and what may become one. Waits for running examinations."""
        read = self._control_plane.read_all_tenants
        while await read(lambda session: service.has_adapters(session, tenant_id)):
            for upload in await self._control_plane.read(
                tenant_id, uploads.list_unfinished_uploads
            ):
                with suppress(InvalidTransition):  # it is being examined
                    await self._pushes.abandon(tenant_id, upload.id, BY_SYSTEM)
            names = await read(
                lambda session: service.list_adapter_names(session, tenant_id, NUM_ADAPTERS)
            )
            await asyncio.gather(*(self._remove_adapter(tenant_id, name) for name in names))
            if not names:
                await asyncio.sleep(POLL_SECONDS)

    async def _remove_adapter(self, tenant_id: str, name: str) -> None:
        with suppress(AdapterNotFound):  # its deletion has begun
            await self._deletions.delete_adapter(tenant_id, name, BY_SYSTEM)

    async def _remove_objects(self, tenant_id: str) -> None:
        """Remove what is left in the store: files, parts of uploads, objects without a row."""
        objects = await self._threads.run(self._list_objects, tenant_id)
        found = {"number": len(objects), "bytes": sum(each.size_bytes for each in objects)}
        await self._control_plane.write_all_tenants(
            lambda session: service.note(session, tenant_id, "objects", found)
        )
        for stored in objects:
            await self._threads.run(self._store.delete, stored.key)

    def _list_objects(self, tenant_id: str) -> list[StoredObject]:
        return list(self._store.list_keys(f"{OBJECT_PREFIX}{tenant_id}/"))

    async def _tell_webhooks(self, tenant_id: str) -> None:
        await self._control_plane.write_all_tenants(
            lambda session: service.announce_removal(session, tenant_id)
        )
        failpoint("tenants.announced")
        await _wait_for_end(
            lambda: self._control_plane.read_all_tenants(
                lambda session: service.has_pending_events(session, tenant_id)
            )
        )


async def erase_rows(control_plane: ControlPlane, deletion: TenantDeletion) -> None:
    """Delete the tenant's rows, in steps that do not keep others from the database for long."""
    while await control_plane.write_all_tenants(
        lambda session: service.forget_callers(session, deletion.id)
    ):
        pass
    failpoint("tenants.forgotten")
    for table in service.tables_to_erase(with_usage=deletion.with_usage):
        while await control_plane.write_all_tenants(
            partial(service.erase_rows, deletion_id=deletion.id, table_name=table)
        ):
            pass


async def erase_late_rows(control_plane: ControlPlane) -> None:
    """Delete what was written for deleted tenants since: records of requests that ended late."""
    for deletion in await control_plane.read_all_tenants(service.list_recent):
        await erase_rows(control_plane, deletion)


async def _sleep_until(moment: datetime) -> None:
    await asyncio.sleep(max(0.0, (moment - utc_now()).total_seconds()))


async def _wait_for_end(is_going_on: Callable[[], Awaitable[bool]]) -> None:
    """Wait, but not for longer than the patience."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await is_going_on():
                await asyncio.sleep(POLL_SECONDS)


def _finish(deletion_id: str, session: PlatformSession) -> Changed[None]:
    deletion = service.finish(session, deletion_id)
    return Changed(None, Event("tenant.erase", deletion.slug, {"id": deletion.id}))


def _lease(deletion: TenantDeletion) -> str:
    return f"tenant-deletion:{deletion.id}"
