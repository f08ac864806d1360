"""What is removed to make room for an upload: the cheapest first, and nothing in use."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from loraplex.adapters.errors import StoreUnavailable
from loraplex.api.adapters.staging import Staging
from loraplex.api.adapters.staging_budget import Hold
from loraplex.api.adapters.upload_room import UploadRoom
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.platform.adapters import uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite
from support.upload_room import make_upload_room

SIZE = 100


@dataclass
class Server:
    """The part of a server that has uploads on its disk."""

    folder: Path
    database: Database
    tenant_id: str
    server_id: str = "this"
    free: int = 1 << 30
    trimmed: list[int] = field(default_factory=list)
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        self.control_plane = ControlPlane(self.database, b"secret" * 8)
        self.staging = Staging(self.folder / "uploads")

    def room(self, total_bytes: int = 1 << 30) -> UploadRoom:
        return make_upload_room(
            self.staging,
            self.control_plane,
            total_bytes=total_bytes,
            free_bytes=lambda: self.free,
            trim_cache=self.trim,
            server_id=self.server_id,
        )

    def trim(self, num_bytes: int) -> int:
        self.trimmed.append(num_bytes)
        freed, self.cache_bytes = min(num_bytes, self.cache_bytes), 0
        self.free += freed
        return freed

    def upload(self, silent: timedelta, server_id: str = "this") -> str:
        """One whose bytes are all here, of which nothing was heard for so long."""
        new = NewUpload(
            adapter_name="bot",
            config_json="{}",
            size_bytes=SIZE - 2,
            sha256=hashlib.sha256(os.urandom(8)).hexdigest(),
            server_id=server_id,
        )
        with self.database.transaction(self.tenant_id) as session:
            upload = uploads.open_upload(session, new)
            upload.received_bytes, upload.updated_at = SIZE - 2, utc_now() - silent
        self.staging.weights_path(upload.id).write_bytes(bytes(SIZE - 2))
        return upload.id

    def find(self, upload_id: str) -> Upload:
        with self.database.transaction(self.tenant_id, read_only=True) as session:
            return uploads.get_upload(session, upload_id)

    def is_whole(self, upload_id: str) -> bool:
        is_there = self.staging.num_bytes(upload_id) > 0
        assert is_there is (self.find(upload_id).state is UploadState.RECEIVING)
        return is_there


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    server = Server(tmp_path, database, make_tenant(database, "acme").id)
    yield server
    server.control_plane.close()
    server.staging.close()


def make(room: UploadRoom, lacking: Callable[[], int]) -> bool:
    return asyncio.run(room.make(lacking))


def test_the_oldest_that_were_silent_for_an_hour_go_first_and_no_more_than_needed(
    server: Server,
) -> None:
    day, hours, minutes = (
        server.upload(silent)
        for silent in (timedelta(days=1), timedelta(hours=2), timedelta(minutes=59))
    )
    room = server.room(total_bytes=500)
    wanted = Hold("new", "newcomer", SIZE)

    assert make(room, lambda: room.budget.lacking_bytes(wanted)), "500 - 300 are enough"
    assert all(map(server.is_whole, (day, hours, minutes)))
    wanted = Hold("new", "newcomer", 150)
    assert make(room, lambda: room.budget.lacking_bytes(wanted))
    assert [server.is_whole(each) for each in (day, hours, minutes)] == [False, True, True]
    wanted = Hold("new", "newcomer", 240)
    assert not make(room, lambda: room.budget.lacking_bytes(wanted))
    assert [server.is_whole(each) for each in (day, hours, minutes)] == [False, False, True]
    assert room.budget.held_ids == {minutes}
    assert server.find(day).config_json == "{}"


def test_what_receives_now_stays_however_long_nothing_was_acknowledged(server: Server) -> None:
    slow = server.upload(timedelta(hours=2))
    room = server.room()
    with room.receiving(slow):
        assert not make(room, lambda: 1)
    assert server.is_whole(slow)


def test_copies_of_stored_adapters_go_before_uploads(server: Server) -> None:
    old = server.upload(timedelta(days=1))
    server.free, server.cache_bytes = 0, 50
    assert make(server.room(), lambda: 30 - server.free)
    assert server.trimmed == [30]
    assert server.is_whole(old)


def test_a_cache_that_does_not_answer_holds_nobody_up(server: Server) -> None:
    old = server.upload(timedelta(days=1))

    def fail(num_bytes: int) -> int:
        raise StoreUnavailable

    room = make_upload_room(
        server.staging, server.control_plane, trim_cache=fail, server_id=server.server_id
    )
    assert make(room, lambda: int(server.staging.num_bytes(old) > 0))
    assert not server.is_whole(old)


def test_uploads_of_other_servers_hold_nothing_here(server: Server) -> None:
    ours = server.upload(timedelta())
    server.upload(timedelta(days=1), server_id="another")
    room = server.room()
    asyncio.run(room.refresh())
    assert room.budget.held_ids == {ours}


def test_what_ended_elsewhere_is_let_go_with_its_bytes(server: Server) -> None:
    """Upkeep of another server, or its tenant there, has abandoned it."""
    ended, kept = server.upload(timedelta()), server.upload(timedelta())
    room = server.room()
    asyncio.run(room.refresh())
    with server.database.transaction(server.tenant_id) as session:
        uploads.abandon_upload(session, ended)
    asyncio.run(room.refresh())
    assert room.budget.held_ids == {kept}
    assert server.staging.num_bytes(ended) == 0
    assert server.is_whole(kept)


def test_an_upload_that_the_database_does_not_know_yet_is_not_let_go(server: Server) -> None:
    """Its transaction is not committed: the next look finds it."""
    room = server.room()
    room.budget.hold(Hold("begun", server.tenant_id, 1))
    asyncio.run(room.refresh())
    assert room.budget.held_ids == {"begun"}
