"""A server says that it is alive, and keeps what its requests have reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import select

from loraplex.api.control_plane import leases, presence
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.presence import Presence
from loraplex.platform.database import Database
from loraplex.platform.jobs.service import LEASE, shared_now
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.held import LEASE_SECONDS
from loraplex.platform.quotas.models import Reservation
from loraplex.platform.servers import service as servers
from loraplex.platform.servers.service import LIVE_SECONDS, ServerInfo
from support.catalog import make_tenant
from support.limits import SERVER_ID, limit, make_demand

INFO = ServerInfo(
    id=SERVER_ID,
    name="host",
    version="1",
    base_id="base",
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def holders(database: Database) -> list[str]:
    """The servers that a deletion which begins now waits for."""
    with database.platform_transaction(read_only=True) as session:
        return list(servers.list_holders(session, shared_now(session)))


def while_present(database: Database, check: Callable[[], None]) -> None:
    """Check something after the server has started, and stop it."""

    async def run() -> None:
        control_plane = ControlPlane(database, b"secret")
        own = Presence(INFO, control_plane)
        await own.start()
        check()
        await own.close()
        control_plane.close()

    asyncio.run(run())


def test_a_server_counts_as_alive_from_its_start_to_its_stop(database: Database) -> None:
    def check() -> None:
        assert holders(database) == [SERVER_ID]

    while_present(database, check)
    assert holders(database) == []


def test_a_living_server_renews_what_its_requests_have_reserved(database: Database) -> None:
    tenant_id = make_tenant(database, "acme").id
    limit(database, tenant_id, concurrent_requests=1)
    with database.transaction(tenant_id) as session:
        quotas.reserve(session, make_demand(), server_id=SERVER_ID)

    def expiry() -> float:
        with database.platform_transaction(read_only=True) as session:
            return session.scalars(select(Reservation.expires_at)).one()

    reserved_until = expiry()
    while_present(database, lambda: None)
    assert expiry() > reserved_until


def test_what_is_renewed_survives_a_renewal_that_fails() -> None:
    for interval, lease in (
        (presence.INTERVAL_SECONDS, LIVE_SECONDS),
        (presence.INTERVAL_SECONDS, LEASE_SECONDS),
        (leases.RENEWAL_SECONDS, LEASE.total_seconds()),
    ):
        assert 2 * interval < lease
