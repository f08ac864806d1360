"""Records in the database that this server is alive, and renews its reservations."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from ...platform.errors import PlatformError
from ...platform.quotas import service as quotas
from ...platform.servers import service as servers
from ...platform.servers.service import ServerInfo
from ...platform.sessions import PlatformSession
from .control_plane import ControlPlane

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 10.0


class Presence:
    """Reports every few seconds that this server is alive; one per server."""

    def __init__(self, info: ServerInfo, control_plane: ControlPlane) -> None:
        self._info = info
        self._control_plane = control_plane
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report it now and then periodically. Raises a PlatformError."""
        await self._say()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            with suppress(PlatformError):
                await self._control_plane.write_all_tenants(
                    lambda session: servers.note_stopped(session, self._info.id)
                )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            try:
                await self._say()
            except PlatformError as exc:
                log.warning("presence_not_noted", error=str(exc))
            except Exception:
                log.exception("presence_not_noted")

    async def _say(self) -> None:
        def note(session: PlatformSession) -> None:
            servers.note_seen(session, self._info)
            quotas.renew(session, self._info.id)

        await self._control_plane.write_all_tenants(note)
