"""Creating, finding and suspending tenants."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy.orm.attributes import set_committed_value

from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue, TenantExists, TenantNotFound
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant


def test_makes_and_lists_tenants_by_slug(database: Database) -> None:
    with database.platform_transaction() as session:
        tenants.create_tenant(session, "bolt", name="Bolt & Sons", weight=2.5)
        tenants.create_tenant(session, "acme")
    with database.platform_transaction(read_only=True) as session:
        listed = [
            (tenant.slug, tenant.name, tenant.weight) for tenant in tenants.list_tenants(session)
        ]
    assert listed == [("acme", None, 1.0), ("bolt", "Bolt & Sons", 2.5)]


def test_lists_tenants_in_pages_and_those_that_are_suspended_or_not(database: Database) -> None:
    with database.platform_transaction() as session:
        for slug in ("cord", "acme", "bolt"):
            tenants.set_suspended(tenants.create_tenant(session, slug), slug == "bolt")
    with database.platform_transaction(read_only=True) as session:

        def slugs(**query: Any) -> list[str]:
            return [tenant.slug for tenant in tenants.list_tenants(session, **query)]

        assert slugs(limit=2) == ["acme", "bolt"]
        assert slugs(after="bolt") == ["cord"]
        assert slugs(is_suspended=True) == ["bolt"]
        assert slugs(is_suspended=False) == ["acme", "cord"]


def test_a_tenant_is_changed_as_the_database_has_it_now(database: Database, acme: Tenant) -> None:
    with database.platform_transaction() as session:
        tenant = tenants.get_tenant(session, "acme")
        set_committed_value(tenant, "weight", 50.0)
        assert tenants.get_tenant_to_change(session, "acme").weight == 1.0


@pytest.mark.parametrize(
    ("weight", "is_allowed"),
    [(0.0, False), (0.0099, False), (0.01, True), (100.0, True), (100.1, False)],
)
def test_a_weight_is_from_a_hundredth_to_a_hundred(weight: float, is_allowed: bool) -> None:
    tenant = Tenant(slug="acme", weight=1.0)
    if is_allowed:
        tenants.set_weight(tenant, weight)
    else:
        with pytest.raises(InvalidValue):
            tenants.set_weight(tenant, weight)
    assert tenant.weight == (weight if is_allowed else 1.0)


@pytest.mark.parametrize("name", ["x", "x" * 200, None])
def test_a_name_has_from_1_to_200_characters(name: str | None) -> None:
    tenant = Tenant(slug="acme", name="before")
    tenants.rename(tenant, name)
    assert tenant.name == name


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
