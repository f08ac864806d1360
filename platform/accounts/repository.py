"""Queries on accounts and their sessions."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, delete, select

from ..operators.models import Operator
from ..sessions import PlatformSession, UnitOfWork
from ..tenants.models import Tenant
from ..users.models import User
from .models import Account, AccountSession


class Holder(NamedTuple):
    """An account and its owner: an operator, or a user of a tenant."""

    account: Account
    operator: Operator | None
    user: User | None
    tenant: Tenant | None

    @property
    def is_active(self) -> bool:
        """Whether its operator or user is active."""
        person = self.operator or self.user
        return person is not None and person.disabled_at is None


def find_operators_account(session: PlatformSession, name: str) -> Holder | None:
    """The account of the operator of this name."""
    return _holder(session, _holders().where(Operator.name == name))


def find_users_account(session: PlatformSession, email: str, tenant_slug: str) -> Holder | None:
    """The account of the user of this address in this tenant."""
    query = _holders().where(User.email == email, Tenant.slug == tenant_slug)
    return _holder(session, query)


def find_by_id(session: PlatformSession, account_id: str) -> Holder | None:
    """The account of this id."""
    return _holder(session, _holders().where(Account.id == account_id))


def find_invited(session: PlatformSession, invitation_hash: str) -> Holder | None:
    """The account that this invitation is for."""
    return _holder(session, _holders().where(Account.invitation_hash == invitation_hash))


def find_session(session: PlatformSession, session_id: str) -> tuple[AccountSession, Holder] | None:
    """The session with this hash, and its account."""
    row = session.get(AccountSession, session_id)
    holder = None if row is None else find_by_id(session, row.account_id)
    return None if row is None or holder is None else (row, holder)


def lock_account(session: UnitOfWork, condition: ColumnElement[bool]) -> Account | None:
    """The one account for which this is so, as the database has it now, until the end locked."""
    query = select(Account).where(condition).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def lock_session(session: UnitOfWork, session_id: str) -> AccountSession | None:
    """The session of this hash, locked likewise."""
    query = select(AccountSession).where(AccountSession.id == session_id).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def list_sessions(session: UnitOfWork, account_id: str) -> list[AccountSession]:
    """The account's sessions."""
    query = select(AccountSession).where(AccountSession.account_id == account_id)
    return list(session.scalars(query))


def purge_sessions(session: PlatformSession, now: datetime, seen_before: datetime) -> int:
    """Forget the sessions that have ended by now, or were not used since; how many."""
    forgotten = session.execute(
        delete(AccountSession)
        .where((AccountSession.expires_at <= now) | (AccountSession.seen_at <= seen_before))
        .returning(AccountSession.id)
    )
    return len(forgotten.all())


def _holders() -> Select[*tuple[Any, ...]]:
    return (
        select(Account, Operator, User, Tenant)
        .outerjoin(Operator, Operator.id == Account.id)
        .outerjoin(User, (User.id == Account.id) & (User.tenant_id == Account.tenant_id))
        .outerjoin(Tenant, Tenant.id == Account.tenant_id)
    )


def _holder(session: PlatformSession, query: Select[*tuple[Any, ...]]) -> Holder | None:
    row = session.execute(query).one_or_none()
    return None if row is None else Holder(*row)
