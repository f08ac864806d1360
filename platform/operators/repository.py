"""Queries on operators and their keys."""

from __future__ import annotations

from sqlalchemy import select

from ..sessions import PlatformSession
from .models import Operator, OperatorKey


def find_by_name(session: PlatformSession, name: str) -> Operator | None:
    """The operator of this name."""
    return session.scalars(select(Operator).where(Operator.name == name)).one_or_none()


def find_key(session: PlatformSession, key_id: str) -> tuple[OperatorKey, Operator] | None:
    """The operator's key of this id, and whose it is."""
    query = (
        select(OperatorKey, Operator)
        .join(Operator, Operator.id == OperatorKey.operator_id)
        .where(OperatorKey.id == key_id)
    )
    row = session.execute(query).one_or_none()
    return None if row is None else (row[0], row[1])
