"""Queries on a tenant's users."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, and_, or_, select

from ..keys.principal import TenantRole
from ..sessions import TenantSession
from .models import User


def list_users(
    session: TenantSession,
    *,
    after: str | None = None,
    limit: int | None = None,
    email: str | None = None,
    role: TenantRole | None = None,
    is_disabled: bool | None = None,
) -> Sequence[User]:
    """The tenant's users by address: at most `limit` after the address `after`."""
    query = select(User).order_by(User.email).limit(limit)
    if after is not None:
        query = query.where(User.email > after)
    if email is not None:
        query = query.where(User.email == email)
    if role is not None:
        query = query.where(User.role == role)
    if is_disabled is not None:
        query = query.where(User.disabled_at.is_not(None) == is_disabled)
    return session.scalars(query).all()


def find(session: TenantSession, user_id: str) -> User | None:
    """The tenant's user of this id, as the database has it now."""
    return session.scalars(_fresh(select(User).where(User.id == user_id))).one_or_none()


def find_and_hold(session: TenantSession, user_id: str) -> User | None:
    """The same, locked against changes until this unit of work ends."""
    query = select(User).where(User.id == user_id).with_for_update(read=True)
    return session.scalars(_fresh(query)).one_or_none()


def find_and_lock(session: TenantSession, user_id: str) -> User | None:
    """The same; it and the tenant's active owners are locked until this unit of work ends.

    All writers use the same order, so two owners cannot disable each other. Rows that only refer to
    them, such as a new session, need not wait.
    """
    query = select(User).where(or_(User.id == user_id, _is_active_owner()))
    locked = session.scalars(_fresh(query.order_by(User.id).with_for_update(key_share=True)))
    return next((user for user in locked if user.id == user_id), None)


def list_active_owner_ids(session: TenantSession) -> Sequence[str]:
    """The ids of active owners, who can add users."""
    return session.scalars(select(User.id).where(_is_active_owner())).all()


def _is_active_owner() -> ColumnElement[bool]:
    return and_(User.role == TenantRole.OWNER, User.disabled_at.is_(None))


def _fresh(query: Select[User]) -> Select[User]:
    return query.execution_options(populate_existing=True)
