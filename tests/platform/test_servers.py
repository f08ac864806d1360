"""Servers that share a database: a deletion waits for those that run."""

from __future__ import annotations

from datetime import UTC, datetime

from loraplex.platform.database import Database
from loraplex.platform.jobs.service import shared_now
from loraplex.platform.servers import service as servers
from loraplex.platform.servers.service import ServerInfo

INFO = ServerInfo(
    id="here",
    name="host",
    version="1",
    base_id="base",
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def holders(database: Database) -> list[str]:
    """The servers that a deletion which begins now waits for."""
    with database.platform_transaction(read_only=True) as session:
        return list(servers.list_holders(session, shared_now(session)))


def test_a_deletion_waits_for_a_server_from_each_start_to_its_stop(database: Database) -> None:
    for _ in range(2):
        with database.platform_transaction() as session:
            servers.note_seen(session, INFO)
        assert holders(database) == ["here"]
        with database.platform_transaction() as session:
            servers.note_stopped(session, "here")
        assert holders(database) == []
