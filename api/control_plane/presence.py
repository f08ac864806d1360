"""Records in the database that this server is alive, and renews its reservations."""

from __future__ import annotations

from contextlib import suppress

import structlog

from ...platform.errors import PlatformError
from ...platform.quotas import service as quotas
from ...platform.servers import service as servers
from ...platform.servers.service import ServerInfo
from ...platform.sessions import PlatformSession
from .control_plane import ControlPlane
from .periodic import Periodic

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 10.0


class Presence:
    """Reports every few seconds that this server is alive; one per server."""

    def __init__(self, info: ServerInfo, control_plane: ControlPlane) -> None:
        self._info = info
        self._control_plane = control_plane
        self._notes = Periodic(
            self._note, seconds=INTERVAL_SECONDS, log=log, failed="presence_not_noted"
        )

    async def start(self) -> None:
        """Report now, and then periodically. Raises a PlatformError."""
        await self._note()
        self._notes.start()

    async def close(self) -> None:
        if self._notes.is_started:
            await self._notes.close()
            with suppress(PlatformError):
                await self._control_plane.write_all_tenants(
                    lambda session: servers.note_stopped(session, self._info.id)
                )

    async def _note(self) -> None:
        def note(session: PlatformSession) -> None:
            servers.note_seen(session, self._info)
            quotas.renew(session, self._info.id)

        await self._control_plane.write_all_tenants(note)
