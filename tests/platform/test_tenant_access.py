"""The tenant in which a caller acts, and whether its requests need admission."""

from __future__ import annotations

import pytest

from loraplex.platform.database import Database
from loraplex.platform.errors import TenantNotFound
from loraplex.platform.keys.principal import (
    SYSTEM,
    AnyPrincipal,
    OperatorPrincipal,
    OperatorRole,
    Principal,
    Scope,
)
from loraplex.platform.tenants.access import act_on_tenant
from loraplex.platform.tenants.models import Tenant
from support.limits import limit

OPERATOR = OperatorPrincipal("id", "ada", OperatorRole.ADMIN)


def key_of(tenant: Tenant) -> Principal:
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=SYSTEM,
        scopes=frozenset({Scope.INFER}),
        key_id="key",
    )


def act(database: Database, caller: AnyPrincipal, slug: str | None) -> AnyPrincipal:
    with database.platform_transaction(read_only=True) as session:
        return act_on_tenant(session, caller, slug)


def is_limited(database: Database, caller: AnyPrincipal, slug: str) -> bool:
    principal = act(database, caller, slug)
    assert isinstance(principal, Principal)
    return principal.is_limited


def test_a_key_acts_on_its_own_tenant_alone(database: Database, acme: Tenant, bolt: Tenant) -> None:
    for slug in (None, acme.slug):
        principal = act(database, key_of(acme), slug)
        assert isinstance(principal, Principal)
        assert principal.tenant_id == acme.id
    for slug in (bolt.slug, "nobody"):
        with pytest.raises(TenantNotFound):
            act(database, key_of(acme), slug)


def test_an_operator_acts_on_the_tenant_that_it_names_or_on_none(
    database: Database, acme: Tenant
) -> None:
    assert act(database, OPERATOR, None) == OPERATOR
    principal = act(database, OPERATOR, acme.slug)
    assert isinstance(principal, Principal)
    assert (principal.tenant_id, principal.operator_role) == (acme.id, OperatorRole.ADMIN)
    with pytest.raises(TenantNotFound):
        act(database, OPERATOR, "nobody")


def test_requests_have_to_ask_where_something_limits_them_and_nowhere_else(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    callers = (key_of(acme), OPERATOR)
    assert not any(is_limited(database, caller, acme.slug) for caller in callers)
    limit(database, acme.id, keys=3)
    assert not any(is_limited(database, caller, acme.slug) for caller in callers)
    limit(database, acme.id, concurrent_requests=1)
    assert all(is_limited(database, caller, acme.slug) for caller in callers)
    assert not is_limited(database, key_of(bolt), bolt.slug)
    limit(database, acme.id)
    assert not any(is_limited(database, caller, acme.slug) for caller in callers)


def test_who_was_not_looked_up_has_to_ask(acme: Tenant) -> None:
    assert key_of(acme).is_limited
