"""Creating, finding and suspending tenants."""

from __future__ import annotations

from datetime import datetime

import pytest

from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue, TenantExists, TenantNotFound
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant


def test_makes_and_lists_tenants_by_slug(database: Database) -> None:
    with database.platform_transaction() as session:
        tenants.create_tenant(session, "bolt", name="Bolt & Sons")
        tenants.create_tenant(session, "acme")
    with database.platform_transaction(read_only=True) as session:
        listed = [(tenant.slug, tenant.name) for tenant in tenants.list_tenants(session)]
    assert listed == [("acme", None), ("bolt", "Bolt & Sons")]


def test_refuses_a_slug_twice_and_goes_on(database: Database, acme: Tenant) -> None:
    with database.platform_transaction() as session:
        with pytest.raises(TenantExists, match="acme"):
            tenants.create_tenant(session, "acme")
        tenants.create_tenant(session, "bolt")
    with database.platform_transaction(read_only=True) as session:
        assert tenants.get_tenant(session, "acme").id == acme.id
        assert tenants.get_tenant(session, "bolt")


@pytest.mark.parametrize(("slug", "name"), [("Acme", None), ("acme", ""), ("acme", "x" * 201)])
def test_refuses_bad_names(database: Database, slug: str, name: str | None) -> None:
    with pytest.raises(InvalidValue), database.platform_transaction() as session:
        tenants.create_tenant(session, slug, name=name)


def test_finds_no_tenant_of_an_unknown_slug(database: Database) -> None:
    with pytest.raises(TenantNotFound), database.platform_transaction() as session:
        tenants.get_tenant(session, "acme")


def test_suspends_and_resumes(database: Database, acme: Tenant) -> None:
    def suspend(is_suspended: bool) -> datetime | None:
        with database.platform_transaction() as session:
            tenant = tenants.get_tenant_to_change(session, "acme")
            tenants.set_suspended(tenant, is_suspended)
        with database.platform_transaction(read_only=True) as session:
            return tenants.get_tenant(session, "acme").suspended_at

    first = suspend(True)
    assert first is not None
    assert suspend(True) == first
    assert suspend(False) is None
    assert suspend(False) is None


def test_times_are_in_utc(database: Database, acme: Tenant) -> None:
    with database.platform_transaction(read_only=True) as session:
        stored = tenants.get_tenant(session, "acme").created_at
    assert stored == acme.created_at
    assert stored.utcoffset() is not None
