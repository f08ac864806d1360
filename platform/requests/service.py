"""Writes and queries the request log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ..errors import InvalidValue, RequestNotFound
from ..sessions import PlatformSession, TenantSession
from . import repository
from .models import LogRow, RequestLogEntry
from .repository import LogFilter, Place


def add(session: PlatformSession, entries: Sequence[LogRow]) -> None:
    """Add entries of any tenants."""
    repository.add(session, entries)


def get(session: TenantSession, request_id: str) -> RequestLogEntry:
    """The tenant's entry of this request. Raises RequestNotFound."""
    entry = repository.find(session, request_id)
    if entry is None:
        raise RequestNotFound(f"You have no request with the id {request_id!r}.")
    return entry


def get_for_any_tenant(session: PlatformSession, request_id: str) -> RequestLogEntry:
    """The entry of this request. Raises RequestNotFound."""
    entry = repository.find_for_any_tenant(session, request_id)
    if entry is None:
        raise RequestNotFound(f"No request has the id {request_id!r}.")
    return entry


def list_newest(
    session: TenantSession | PlatformSession,
    wanted: LogFilter,
    *,
    before: str | None = None,
    limit: int,
) -> Sequence[RequestLogEntry]:
    """Up to `limit` entries, newest first, after the cursor `before`. Raises InvalidValue."""
    place = None if before is None else _parse_cursor(before)
    return repository.list_newest(session, wanted, before=place, limit=limit)


def cursor_of(entry: RequestLogEntry) -> str:
    """The cursor with which `list_newest` continues after this entry."""
    return f"{entry.created_at.isoformat()}~{entry.request_id}"


def _parse_cursor(text: str) -> Place:
    moment, _, request_id = text.partition("~")
    try:
        created_at = datetime.fromisoformat(moment)
    except ValueError:
        created_at = None
    if created_at is None or created_at.tzinfo is None:
        raise InvalidValue("Not a `next_after` value of this list.", param="after")
    return Place(created_at, request_id)
