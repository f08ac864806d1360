"""Deletes old entries of the request log."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select

from ..sessions import PlatformSession
from .models import RequestLogEntry

ROWS_AT_ONCE = 5000
"""Few enough that the transaction delays no other."""


def purge(session: PlatformSession, before: datetime) -> int:
    """Forget some of the oldest requests from before this moment; how many."""
    oldest = (
        select(RequestLogEntry.request_id)
        .where(RequestLogEntry.created_at < before)
        .order_by(RequestLogEntry.created_at)
        .limit(ROWS_AT_ONCE)
    )
    forgotten = session.execute(
        delete(RequestLogEntry)
        .where(RequestLogEntry.request_id.in_(oldest.scalar_subquery()))
        .returning(RequestLogEntry.request_id)
    )
    return len(forgotten.all())
