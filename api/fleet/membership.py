"""Keeps this server's fleet and the table of replicas in agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

import structlog

from ...engine.fleet.fleet import AskedRenewal, Fleet
from ...engine.fleet.member import Member
from ...engine.messages import ReplicaState
from ...platform.jobs.service import shared_now
from ...platform.replicas import service as replicas
from ...platform.replicas.address import parse_address
from ...platform.replicas.models import Replica
from ...platform.replicas.service import Renewal
from ...platform.sessions import PlatformSession
from ..control_plane.control_plane import ControlPlane
from ..control_plane.periodic import Periodic

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
LIVE_SECONDS = 10.0
"""An agent asks for its lease every 3 s. One that has not for this time does not serve now."""


class Membership:
    """Writes that replicas live before it renews their leases, and reads which replicas there are.

    One per server. While the database is unavailable, the connections stay, and leases run out.
    """

    def __init__(self, fleet: Fleet, control_plane: ControlPlane, *, lease_seconds: float) -> None:
        self._fleet = fleet
        self._control_plane = control_plane
        self._lease_seconds = lease_seconds
        self._looks = Periodic(
            self.look,
            seconds=LOOK_SECONDS,
            log=log,
            failed="replicas_not_read",
            at_once=True,
        )

    def start(self) -> None:
        self._looks.start()

    async def close(self) -> None:
        await self._looks.close()

    async def add(self, addresses: Sequence[str]) -> None:
        """Add replicas with these addresses, if there are none yet. Raises a PlatformError."""

        def add(session: PlatformSession) -> None:
            for address in addresses:
                replicas.add(session, address)

        await self._control_plane.write_all_tenants(add)

    async def look(self) -> None:
        """Renew the leases that agents asked for, and take the rows. Raises a PlatformError."""
        asked = self._fleet.asked_renewals()

        def renew(session: PlatformSession) -> Mapping[str, str | None]:
            renewals = [_as_renewal(each) for each in asked]
            return replicas.renew(session, renewals, lease_seconds=self._lease_seconds)

        refusals = await self._control_plane.write_all_tenants(renew) if asked else {}
        for each in asked:
            self._fleet.answer_renewal(each, refusals[each.id], self._lease_seconds)
        await self._fleet.set_members(await self._control_plane.read_all_tenants(self._read))

    def _read(self, session: PlatformSession) -> list[Member]:
        rows, now = replicas.list_replicas(session), shared_now(session)
        return [self._as_member(row, now) for row in rows]

    def _as_member(self, row: Replica, now: datetime) -> Member:
        host, port = parse_address(row.address)
        is_serving = row.state == ReplicaState.READY and not row.is_draining
        return Member(
            id=row.id,
            host=host,
            port=port,
            is_draining=row.is_draining,
            incarnation=row.incarnation,
            is_live=is_serving and replicas.is_live(row, now, LIVE_SECONDS),
            has_expired=replicas.has_expired(row, now, self._lease_seconds),
        )


def _as_renewal(asked: AskedRenewal) -> Renewal:
    return Renewal(
        id=asked.id,
        incarnation=asked.incarnation,
        base_id=asked.base_id,
        runtime_id=asked.runtime_id,
        state=asked.state,
        figures=asdict(asked.figures),
    )
