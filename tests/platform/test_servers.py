"""Servers that share a database: a deletion waits for those that run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from loraplex.platform.database import Database
from loraplex.platform.jobs.service import shared_now
from loraplex.platform.servers import service as servers
from loraplex.platform.servers.models import Server
from loraplex.platform.servers.service import LIVE_SECONDS, ServerInfo

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


def test_a_deletion_waits_no_longer_for_a_server_that_was_not_seen_for_a_minute(
    database: Database,
) -> None:
    for silent_seconds, waits in ((LIVE_SECONDS - 5, True), (LIVE_SECONDS, False)):
        with database.platform_transaction() as session:
            servers.note_seen(session, INFO)
        with database.platform_transaction() as session:
            session.get_one(Server, "here").seen_at -= timedelta(seconds=silent_seconds)
        assert (holders(database) == ["here"]) is waits


def test_a_deletion_waits_until_a_server_has_released_what_is_deleted_by_then(
    database: Database,
) -> None:
    with database.platform_transaction() as session:
        servers.note_seen(session, INFO)
        begun_at = shared_now(session)
    for passed, waits in ((timedelta(seconds=-1), True), (timedelta(), False)):
        with database.platform_transaction() as session:
            servers.note_evicted(session, "here", begun_at + passed)
            assert (list(servers.list_holders(session, begun_at)) == ["here"]) is waits
