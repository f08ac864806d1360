"""Queries on the request log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, cast

from sqlalchemy import Select, Table, insert, select, tuple_

from ..sessions import PlatformSession, TenantSession
from .models import LogRow, RequestLogEntry


class Place(NamedTuple):
    """The position of an entry in the log, newest first."""

    created_at: datetime
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which entries are wanted; None wants all."""

    adapter: str | None = None
    visible: frozenset[str] | None = None
    """The adapters whose requests the caller may see; None: all, and the base's."""
    code: str | None = None
    """The error's."""
    status: int | None = None
    since: datetime | None = None
    until: datetime | None = None


def add(session: PlatformSession, rows: Sequence[LogRow]) -> None:
    """Add entries of any tenants: plain rows, since every request has one."""
    session.connection().execute(insert(cast(Table, RequestLogEntry.__table__)), rows)


def find(session: TenantSession, request_id: str) -> RequestLogEntry | None:
    """The tenant's entry of this request."""
    query = select(RequestLogEntry).where(RequestLogEntry.request_id == request_id)
    return session.scalars(query).one_or_none()


def find_for_any_tenant(session: PlatformSession, request_id: str) -> RequestLogEntry | None:
    """The entry of this request, whosever it is."""
    return session.get(RequestLogEntry, request_id)


def list_newest(
    session: TenantSession | PlatformSession,
    wanted: LogFilter,
    *,
    before: Place | None,
    limit: int,
) -> Sequence[RequestLogEntry]:
    """Up to `limit` entries, newest first, after `before`."""
    query = _filtered(wanted)
    place = (RequestLogEntry.created_at, RequestLogEntry.request_id)
    if before is not None:
        query = query.where(tuple_(*place) < tuple_(before.created_at, before.request_id))
    return session.scalars(query.order_by(*(part.desc() for part in place)).limit(limit)).all()


def _filtered(wanted: LogFilter) -> Select[RequestLogEntry]:
    query = select(RequestLogEntry)
    if wanted.adapter is not None:
        query = query.where(RequestLogEntry.adapter_name == wanted.adapter)
    if wanted.visible is not None:
        query = query.where(RequestLogEntry.adapter_name.in_(wanted.visible))
    if wanted.code is not None:
        query = query.where(RequestLogEntry.error_code == wanted.code)
    if wanted.status is not None:
        query = query.where(RequestLogEntry.status == wanted.status)
    if wanted.since is not None:
        query = query.where(RequestLogEntry.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(RequestLogEntry.created_at < wanted.until)
    return query
