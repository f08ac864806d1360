"""Which installations serve from this database, and which of them live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select

from ..base import utc_now
from ..sessions import PlatformSession
from .models import Server

LIVE_SECONDS = 60.0
"""A server that was not seen for so long is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    id: str
    name: str
    version: str
    base_id: str
    started_at: datetime


def note_seen(session: PlatformSession, info: ServerInfo) -> None:
    """The server lives."""
    row = session.get(Server, info.id)
    if row is None:
        row = Server(id=info.id)
        session.add(row)
    row.name, row.version, row.base_id = info.name, info.version, info.base_id
    row.started_at, row.seen_at = info.started_at, utc_now()


def list_servers(
    session: PlatformSession, *, after: str | None = None, limit: int | None = None
) -> Sequence[Server]:
    """Every server that was ever seen, by id: those behind `after`, at most `limit` of them."""
    query = select(Server).order_by(Server.id).limit(limit)
    if after is not None:
        query = query.where(Server.id > after)
    return session.scalars(query).all()


def is_live(server: Server, now: datetime) -> bool:
    """It was seen lately."""
    return now - server.seen_at < timedelta(seconds=LIVE_SECONDS)
