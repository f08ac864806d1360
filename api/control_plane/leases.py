"""The job leases of this server: acquired, renewed while the job runs, and released."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

import structlog

from ...platform.errors import PlatformError
from ...platform.jobs import service as jobs
from .control_plane import ControlPlane

log = structlog.get_logger(__name__)

RENEWAL_SECONDS = jobs.LEASE.total_seconds() / 4

Result = TypeVar("Result")


class LeaseLost(Exception):
    """Another server has taken over the work, because this one did not renew its lease in time."""


class Leases:
    """One per server."""

    def __init__(self, control_plane: ControlPlane, server_id: str) -> None:
        self.server_id = server_id
        self._control_plane = control_plane

    async def claim(self, name: str, *, every: timedelta | None = None) -> bool:
        """Take the lease; see `platform.jobs.service.claim`. Raises a PlatformError."""
        return await self._control_plane.write_all_tenants(
            lambda session: jobs.claim(session, name, self.server_id, every=every)
        )

    async def keep(self, name: str, work: Coroutine[Any, Any, Result]) -> Result:
        """The result or error of the work; the lease is renewed until then.

        Raises LeaseLost, with the work cancelled, if another server has taken the lease.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=RENEWAL_SECONDS))[0]:
                if not await self._renew(name):
                    raise LeaseLost(name)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def finish(self, name: str) -> None:
        """The work is done until its next due time."""
        await self._control_plane.write_all_tenants(
            lambda session: jobs.finish(session, name, self.server_id)
        )

    async def postpone(self, name: str, pause: timedelta) -> None:
        """The job failed; no server tries again before the pause is over."""
        await self._control_plane.write_all_tenants(
            lambda session: jobs.postpone(session, name, self.server_id, pause)
        )

    async def forget(self, name: str) -> None:
        """The work is done and never due again."""
        await self._control_plane.write_all_tenants(
            lambda session: jobs.forget(session, name, self.server_id)
        )

    async def _renew(self, name: str) -> bool:
        try:
            held = await self._control_plane.write_all_tenants(
                lambda session: jobs.renew(session, [name], self.server_id)
            )
        except PlatformError as exc:  # no other server can take it either
            log.warning("lease_not_renewed", lease=name, error=str(exc))
            return True
        return name in held
