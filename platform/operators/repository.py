"""Queries on operators and their keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, func, or_, select

from ..keys.principal import OperatorRole
from ..sessions import PlatformSession
from .models import Operator, OperatorKey


def list_operators(
    session: PlatformSession, *, after: str | None = None, limit: int | None = None
) -> Sequence[Operator]:
    """Operators by name: at most `limit` after the name `after`."""
    query = select(Operator).order_by(Operator.name).limit(limit)
    if after is not None:
        query = query.where(Operator.name > after)
    return session.scalars(query).all()


def find_by_name(session: PlatformSession, name: str) -> Operator | None:
    """The operator of this name."""
    return session.scalars(select(Operator).where(Operator.name == name)).one_or_none()


def find_and_lock(session: PlatformSession, name: str) -> Operator | None:
    """The operator of this name as the database has it now.

    It and the active administrators are locked against other writers, in one order for all, until
    this unit of work ends: so two cannot disable each other.
    """
    query = (
        select(Operator)
        .where(or_(Operator.name == name, _is_active_admin()))
        .order_by(Operator.id)
        .with_for_update()
    )
    locked = session.scalars(query.execution_options(populate_existing=True))
    return next((operator for operator in locked if operator.name == name), None)


def list_active_admin_ids(session: PlatformSession) -> Sequence[str]:
    """The ids of active administrators of the platform."""
    return session.scalars(select(Operator.id).where(_is_active_admin())).all()


def list_keys(session: PlatformSession, operator_id: str) -> Sequence[OperatorKey]:
    """The operator's keys, the oldest first."""
    query = select(OperatorKey).where(OperatorKey.operator_id == operator_id)
    return session.scalars(query.order_by(OperatorKey.created_at, OperatorKey.id)).all()


def find_key(session: PlatformSession, key_id: str) -> tuple[OperatorKey, Operator] | None:
    """The operator's key with this id, and its operator."""
    query = (
        select(OperatorKey, Operator)
        .join(Operator, Operator.id == OperatorKey.operator_id)
        .where(OperatorKey.id == key_id)
    )
    row = session.execute(query).one_or_none()
    return None if row is None else (row[0], row[1])


def count_ending(session: PlatformSession, now: datetime, until: datetime) -> int:
    """The number of usable keys of active operators that end before then."""
    query = (
        select(func.count(OperatorKey.id))
        .join(Operator, Operator.id == OperatorKey.operator_id)
        .where(
            Operator.disabled_at.is_(None),
            OperatorKey.revoked_at.is_(None),
            OperatorKey.expires_at > now,
            OperatorKey.expires_at <= until,
        )
    )
    return session.scalar(query) or 0


def count_by_secret(session: PlatformSession) -> dict[str, int]:
    """How many unrevoked keys are signed under each of the server's secrets."""
    query = (
        select(OperatorKey.secret_id, func.count())
        .where(OperatorKey.revoked_at.is_(None))
        .group_by(OperatorKey.secret_id)
    )
    return {row[0]: row[1] for row in session.execute(query)}


def _is_active_admin() -> ColumnElement[bool]:
    return and_(Operator.role == OperatorRole.ADMIN, Operator.disabled_at.is_(None))
