"""What a running server reports of itself, and the upkeep of what others left."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest.mock import AsyncMock

from sqlalchemy import select

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.presence import Presence
from loraplex.api.upkeep.shared_upkeep import SharedUpkeep
from loraplex.platform.database import Database
from loraplex.platform.models import Reservation
from loraplex.platform.quotas import service as quotas
from loraplex.platform.servers.service import ServerInfo
from support.catalog import make_tenant
from support.limits import SERVER_ID, limit, make_demand

INFO = ServerInfo(
    id=SERVER_ID,
    name="host",
    version="1",
    base_id="base",
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def reserve(database: Database) -> None:
    """Make the reservation `req-1`."""
    tenant = make_tenant(database, "acme")
    limit(database, tenant.id, concurrent_requests=1)
    with database.transaction(tenant.id) as session:
        quotas.reserve(session, make_demand(), server_id=SERVER_ID)


def test_the_reservations_of_a_server_that_lives_are_renewed(database: Database) -> None:
    reserve(database)
    with database.platform_transaction() as session:
        before = session.scalars(select(Reservation.expires_at)).one() - quotas.LEASE_SECONDS
        session.get_one(Reservation, "req-1").expires_at = before
    plane = ControlPlane(database, b"secret" * 8)

    async def live() -> None:
        presence = Presence(INFO, plane)
        await presence.start()
        await presence.close()

    asyncio.run(live())
    plane.close()
    with database.platform_transaction(read_only=True) as session:
        after = session.scalars(select(Reservation.expires_at)).one()
    assert after >= before + quotas.LEASE_SECONDS


def test_upkeep_drops_the_reservations_of_servers_that_never_came_back(database: Database) -> None:
    reserve(database)
    with database.platform_transaction() as session:
        row = session.get_one(Reservation, "req-1")
        row.created_at -= timedelta(days=2)
        row.expires_at = 0.0
    plane = ControlPlane(database, b"secret" * 8)
    upkeep = SharedUpkeep(plane, AsyncMock(), request_log_days=1, upload_days=1)
    (job,) = (each for each in upkeep.jobs() if each.name == "reservations")
    asyncio.run(cast(Any, job.run)())
    plane.close()
    with database.platform_transaction(read_only=True) as session:
        assert session.scalars(select(Reservation)).all() == []
