"""Identities in the control plane: who is found, who is added, and what each tenant sees."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AccountDisabled,
    FlowSpent,
    IdentityConflict,
    LastAdministrator,
    QuotaExceeded,
)
from loraplex.platform.identities import service as identities
from loraplex.platform.identities.models import Identity, SpentFlow
from loraplex.platform.identities.service import Person
from loraplex.platform.keys.principal import OperatorRole, TenantRole
from loraplex.platform.operators.models import Operator
from loraplex.platform.quotas.models import Quota
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users.models import User

ISSUER = "https://id.example"
ADA = Person(ISSUER, "1", "ada@acme.example")


def admit(
    database: Database, tenant: Tenant, person: Person, role: TenantRole = TenantRole.VIEWER
) -> str:
    """The id of the person's user."""
    with database.transaction(tenant.id) as session:
        holder = identities.admit_user(session, person, role).result
        assert holder.user is not None
        assert holder.account.id == holder.user.id
        assert holder.tenant is not None
        assert holder.tenant.id == tenant.id
        return holder.user.id


def admit_operator(database: Database, person: Person, role: OperatorRole) -> str:
    """The name of the person's operator."""
    with database.platform_transaction() as session:
        holder = identities.admit_operator(session, person, role).result
        assert holder.operator is not None
        return holder.operator.name


def test_a_person_is_the_same_user_again_whatever_the_address(
    database: Database, acme: Tenant
) -> None:
    first = admit(database, acme, ADA)
    assert admit(database, acme, Person(ISSUER, "1", "other@acme.example")) == first
    assert admit(database, acme, Person(ISSUER, "1", None)) == first
    other_issuer = Person("https://other.example", "1", "ada2@acme.example")
    other_subject = Person(ISSUER, "1 ", "ada3@acme.example")
    assert (
        len({first, *(admit(database, acme, each) for each in (other_issuer, other_subject))}) == 3
    )


def test_a_person_has_a_user_in_each_tenant_and_may_be_an_operator_too(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    assert admit(database, acme, ADA) != admit(database, bolt, ADA)
    assert admit_operator(database, ADA, OperatorRole.VIEWER) == "ada.acme.example"
    assert admit_operator(database, ADA, OperatorRole.VIEWER) == "ada.acme.example"
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            (row,) = session.scalars(select(Identity))
            assert row.tenant_id == tenant.id


def test_the_event_says_who_was_added_or_changed(database: Database, acme: Tenant) -> None:
    actions = []
    for role in (TenantRole.VIEWER, TenantRole.VIEWER, TenantRole.OWNER):
        with database.transaction(acme.id) as session:
            event = identities.admit_user(session, ADA, role).event
            actions.append(event and (event.action, event.details["role"]))
    assert actions == [("user.create", "viewer"), None, ("user.change", "owner")]


def test_two_operators_cannot_have_one_identity(database: Database) -> None:
    admit_operator(database, ADA, OperatorRole.VIEWER)
    with pytest.raises(IntegrityError), database.platform_transaction() as session:
        session.add(Identity(id="another", issuer=ISSUER, subject="1", created_at=utc_now()))


def test_an_address_or_name_that_is_taken_is_a_conflict(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        session.add(User(email="ada@acme.example", role=TenantRole.OWNER))
    with database.platform_transaction() as session:
        session.add(Operator(name="ada.acme.example", role=OperatorRole.ADMIN))
    with pytest.raises(IdentityConflict):
        admit(database, acme, ADA)
    with pytest.raises(IdentityConflict):
        admit_operator(database, ADA, OperatorRole.ADMIN)
    with database.transaction(acme.id) as session:
        assert session.scalars(select(Identity)).all() == []


@pytest.mark.parametrize(
    "email", [None, "", "ada", "a b@acme.example", "x" * 300 + "@acme.example"]
)
def test_an_address_that_is_none_is_a_conflict(
    email: str | None, database: Database, acme: Tenant
) -> None:
    with pytest.raises(IdentityConflict):
        admit(database, acme, Person(ISSUER, "1", email))


def test_a_disabled_owner_is_refused_and_keeps_the_identity(
    database: Database, acme: Tenant
) -> None:
    first = admit(database, acme, ADA)
    name = admit_operator(database, ADA, OperatorRole.VIEWER)
    with database.platform_transaction() as session:
        for person in (session.get_one(User, first), session.scalars(select(Operator)).one()):
            person.disabled_at = utc_now()
    with pytest.raises(AccountDisabled):
        admit(database, acme, ADA)
    with pytest.raises(AccountDisabled):
        admit_operator(database, ADA, OperatorRole.VIEWER)
    with database.platform_transaction() as session:
        for person in (session.get_one(User, first), session.scalars(select(Operator)).one()):
            person.disabled_at = None
    assert admit(database, acme, ADA) == first
    assert admit_operator(database, ADA, OperatorRole.VIEWER) == name


def test_the_last_administrator_stays_one(database: Database) -> None:
    admit_operator(database, ADA, OperatorRole.ADMIN)
    with pytest.raises(LastAdministrator):
        admit_operator(database, ADA, OperatorRole.VIEWER)
    admit_operator(database, Person(ISSUER, "2", "bob@acme.example"), OperatorRole.ADMIN)
    admit_operator(database, ADA, OperatorRole.VIEWER)


def test_a_first_sign_in_needs_room_for_another_user(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        session.add(Quota(users=1))
    admit(database, acme, ADA)
    with pytest.raises(QuotaExceeded):
        admit(database, acme, Person(ISSUER, "2", "bob@acme.example"))
    admit(database, acme, ADA)


def test_a_flow_is_spent_once_and_forgotten_when_it_has_expired(database: Database) -> None:
    ends_at = datetime.now(UTC) + timedelta(minutes=10)
    with database.platform_transaction() as session:
        identities.spend(session, "flow", ends_at)
        identities.spend(session, "old", ends_at - timedelta(minutes=11))
    with pytest.raises(FlowSpent), database.platform_transaction() as session:
        identities.spend(session, "flow", ends_at)
    with database.platform_transaction() as session:
        assert identities.purge(session) == 1
        assert session.scalars(select(SpentFlow.id)).all() == ["flow"]
