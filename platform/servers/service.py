"""The servers that share this database, and which of them are alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select

from ..jobs.service import shared_now
from ..sessions import PlatformSession
from .models import Server

LIVE_SECONDS = 60.0
"""A server that was not seen for this time counts as stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The information that a server reports."""

    id: str
    name: str
    version: str
    base_id: str
    started_at: datetime


def note_seen(session: PlatformSession, info: ServerInfo) -> None:
    """The server lives."""
    now = shared_now(session)
    row = session.get(Server, info.id)
    if row is None:
        row = Server(id=info.id)
        session.add(row)
    row.name, row.version, row.base_id = info.name, info.version, info.base_id
    row.started_at, row.seen_at = info.started_at, now
    row.stopped_at = None


def note_stopped(session: PlatformSession, server_id: str) -> None:
    """The server has stopped and holds no content, so no deletion waits for it."""
    row = session.get(Server, server_id)
    if row is not None:
        row.stopped_at = shared_now(session)


def note_evicted(session: PlatformSession, server_id: str, moment: datetime) -> None:
    """The server has released all content that was being deleted at this time."""
    row = session.get(Server, server_id)
    if row is not None:
        row.evicted_at = moment


def list_holders(session: PlatformSession, since: datetime) -> Sequence[str]:
    """The ids of live servers that may still hold content deleted since this time."""
    now = shared_now(session)
    return [
        server.id
        for server in list_servers(session)
        if is_live(server, now) and (server.evicted_at is None or server.evicted_at < since)
    ]


def list_servers(
    session: PlatformSession, *, after: str | None = None, limit: int | None = None
) -> Sequence[Server]:
    """Every known server by id: at most `limit` after `after`."""
    query = select(Server).order_by(Server.id).limit(limit)
    if after is not None:
        query = query.where(Server.id > after)
    return session.scalars(query).all()


def is_alive(session: PlatformSession, server_id: str) -> bool:
    """Whether the server of this id is known, and lives."""
    row = session.get(Server, server_id)
    return row is not None and is_live(row, shared_now(session))


def is_live(server: Server, now: datetime) -> bool:
    """Whether it reported recently and has not stopped."""
    return server.stopped_at is None and now - server.seen_at < timedelta(seconds=LIVE_SECONDS)
