"""Admits people whom the identity provider has authenticated.

An identity is the issuer and the subject. An email address only names a new user: it never selects
an existing one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from ..accounts.models import Account, AccountKind
from ..accounts.repository import Holder
from ..audit.event import Changed, Event
from ..base import JsonObject, utc_now
from ..errors import (
    AccountDisabled,
    FlowSpent,
    IdentityConflict,
    IdentityNotFound,
    InvalidValue,
    LastAdministrator,
)
from ..keys.principal import OperatorRole, TenantRole
from ..locked_rows import lock_or_add
from ..names import check_operator_name
from ..operators import repository as operators
from ..operators.models import Operator
from ..quotas import service as quotas
from ..quotas.service import Resource
from ..sessions import PlatformSession, TenantSession, UnitOfWork
from ..tenants.models import Tenant
from ..users.models import User
from ..users.service import check_email
from . import repository
from .models import Identity, SpentFlow


@dataclass(frozen=True, slots=True)
class Person:
    """A person whom the identity provider has authenticated."""

    issuer: str
    subject: str
    email: str | None
    """Names a new user or operator; None: the provider sent none, or says that it is unverified."""


def admit_user(session: TenantSession, person: Person, role: TenantRole) -> Changed[Holder]:
    """The person's user in the tenant, with this role from now on; added at the first sign-in.

    Raises AccountDisabled, IdentityConflict or QuotaExceeded.
    """
    user, event = repository.find_user(session, person.issuer, person.subject), None
    if user is None:
        user = _add_user(session, person, role)
        event = Event("user.create", user.id, {"email": user.email, **_facts(person, role)})
    elif user.disabled_at is not None:
        raise AccountDisabled
    elif user.role is not role:
        user.role = role
        event = Event("user.change", user.id, _facts(person, role))
    account = lock_or_add(session, Account(id=user.id, kind=AccountKind.USER))
    tenant = session.scalars(select(Tenant)).one()
    return Changed(Holder(account, None, user, tenant), event)


def admit_operator(session: PlatformSession, person: Person, role: OperatorRole) -> Changed[Holder]:
    """The person's operator, likewise.

    Raises AccountDisabled, IdentityConflict, or LastAdministrator if the role is a lower one.
    """
    operator, event = repository.find_operator(session, person.issuer, person.subject), None
    if operator is None:
        operator = _add_operator(session, person, role)
        event = Event("operator.create", operator.name, _facts(person, role))
    elif operator.disabled_at is not None:
        raise AccountDisabled
    elif operator.role is not role:
        operators.find_and_lock(session, operator.name)
        if operators.list_active_admin_ids(session) == [operator.id]:
            raise LastAdministrator
        operator.role = role
        event = Event("operator.change", operator.name, _facts(person, role))
    account = lock_or_add(session, Account(id=operator.id, kind=AccountKind.OPERATOR))
    return Changed(Holder(account, operator, None, None), event)


def get_identity(session: UnitOfWork, owner_id: str) -> Identity:
    """The identity of the user or operator. Raises IdentityNotFound."""
    identity = repository.find_by_owner(session, owner_id)
    if identity is None:
        raise IdentityNotFound
    return identity


def link(session: UnitOfWork, owner: User | Operator, issuer: str, subject: str) -> bool:
    """Give the user or operator this identity, instead of an earlier one; whether this changes
    anything.

    Raises IdentityConflict if it is another user's of the tenant, or another operator's.
    """
    row = repository.find_by_owner(session, owner.id)
    if row is not None and (row.issuer, row.subject) == (issuer, subject):
        return False
    try:
        with session.begin_nested():
            if row is None:
                row = Identity(id=owner.id, issuer=issuer, subject=subject, created_at=utc_now())
                session.add(row)
            row.issuer, row.subject, row.created_at = issuer, subject, utc_now()
    except IntegrityError as exc:
        raise IdentityConflict("Another user or operator has this identity.") from exc
    return True


def unlink(session: UnitOfWork, owner_id: str) -> None:
    """Take the identity of the user or operator away. Raises IdentityNotFound."""
    session.delete(get_identity(session, owner_id))


def spend(session: PlatformSession, flow_id: str, expires_at: datetime) -> None:
    """Note that the flow is used. Raises FlowSpent if it was used before."""
    try:
        with session.begin_nested():
            session.add(SpentFlow(id=flow_id, expires_at=expires_at))
    except IntegrityError as exc:
        raise FlowSpent from exc


def purge(session: PlatformSession) -> int:
    """Forget the spent flows that have expired; how many."""
    return repository.purge_flows(session, utc_now())


def _add_user(session: TenantSession, person: Person, role: TenantRole) -> User:
    email = _name_of(person, check_email)
    quotas.check_room(session, Resource.USERS)
    user = User(email=email, role=role, created_at=utc_now())
    _add(session, user, person)
    return user


def _add_operator(session: PlatformSession, person: Person, role: OperatorRole) -> Operator:
    name = _name_of(person, lambda email: check_operator_name(email.lower().replace("@", ".")))
    operator = Operator(name=name, role=role, created_at=utc_now())
    _add(session, operator, person)
    return operator


def _name_of(person: Person, check: Callable[[str], str]) -> str:
    """The name of a new user or operator. Raises IdentityConflict."""
    if person.email is None:
        raise IdentityConflict("The identity provider sent no verified email address.")
    try:
        return check(person.email)
    except InvalidValue as exc:
        raise IdentityConflict(f"The email address cannot be used as a name: {exc}") from exc


def _add(session: UnitOfWork, owner: User | Operator, person: Person) -> None:
    try:
        with session.begin_nested():
            session.add(owner)
            session.flush()
            session.add(Identity(id=owner.id, created_at=utc_now(), **_key(person)))
    except IntegrityError as exc:
        raise IdentityConflict from exc


def _key(person: Person) -> dict[str, str]:
    return {"issuer": person.issuer, "subject": person.subject}


def _facts(person: Person, role: TenantRole | OperatorRole) -> JsonObject:
    return {"role": role, **_key(person)}
