"""Services are woken by the changes that make work for them, once these are committed."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.platform.audit.event import BY_SYSTEM, Changed, Event
from loraplex.platform.database import Database
from loraplex.platform.errors import TenantNotFound
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants import service as tenants


def test_a_committed_change_wakes_those_that_asked_for_its_action(database: Database) -> None:
    with database.platform_transaction() as session:
        tenant_id = tenants.create_tenant(session, "acme").id
    plane = ControlPlane(database, b"secret")
    woken: list[str] = []
    plane.wake_after(("batch.create", "batch.end"), lambda: woken.append("one"))
    plane.wake_after(("batch.create",), lambda: woken.append("two"))

    def change(action: str | None) -> None:
        event = Event(action, "a") if action else None
        asyncio.run(plane.change(tenant_id, BY_SYSTEM, lambda _: Changed(None, event)))

    change("batch.end")
    assert woken == ["one"]
    change("batch.cancel")
    change(None)
    assert woken == ["one"]
    change("batch.create")
    assert woken == ["one", "one", "two"]


def test_a_change_that_fails_wakes_nobody(database: Database) -> None:
    with database.platform_transaction() as session:
        tenant_id = tenants.create_tenant(session, "acme").id
    plane = ControlPlane(database, b"secret")
    woken: list[str] = []
    plane.wake_after(("batch.create",), lambda: woken.append("one"))

    def fail(session: TenantSession) -> Changed[None]:
        raise TenantNotFound("acme")

    with pytest.raises(TenantNotFound):
        asyncio.run(plane.change(tenant_id, BY_SYSTEM, fail))
    assert woken == []
