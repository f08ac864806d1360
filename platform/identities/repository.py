"""Queries on identities and spent flows."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select

from ..operators.models import Operator
from ..sessions import PlatformSession, TenantSession, UnitOfWork
from ..users.models import User
from .models import Identity, SpentFlow


def find_user(session: TenantSession, issuer: str, subject: str) -> User | None:
    """The tenant's user with this identity, locked until this unit of work ends."""
    query = (
        select(User)
        .join(Identity, (Identity.id == User.id) & (Identity.tenant_id == User.tenant_id))
        .where(Identity.issuer == issuer, Identity.subject == subject)
        .with_for_update(of=User)
    )
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def find_operator(session: PlatformSession, issuer: str, subject: str) -> Operator | None:
    """The operator with this identity."""
    query = (
        select(Operator)
        .join(Identity, Identity.id == Operator.id)
        .where(Identity.tenant_id.is_(None), Identity.issuer == issuer, Identity.subject == subject)
    )
    return session.scalars(query).one_or_none()


def find_by_owner(session: UnitOfWork, owner_id: str) -> Identity | None:
    """The identity of this user or operator."""
    return session.scalars(select(Identity).where(Identity.id == owner_id)).one_or_none()


def purge_flows(session: PlatformSession, now: datetime) -> int:
    """Forget the spent flows that have expired; how many."""
    query = delete(SpentFlow).where(SpentFlow.expires_at <= now).returning(SpentFlow.id)
    return len(session.execute(query).all())
