"""Several servers on one store take the parts of one upload, and one of them its commit."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.errors import AdapterRejected, StoreUnavailable
from loraplex.adapters.examination import IntakeReport
from loraplex.adapters.store.local import LocalStore
from loraplex.api.adapters import pushes as pushes_module
from loraplex.api.adapters.pushes import Pushed, Pushes
from loraplex.api.adapters.staging import Staging
from loraplex.api.contract.errors import ApiError
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.upkeep.garbage import Garbage
from loraplex.platform.adapters import upload_part, upload_upkeep, uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.audit.event import BY_SYSTEM
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    DatabaseUnavailable,
    InvalidTransition,
    TooManyParts,
    UploadConflict,
    UploadElsewhere,
)
from loraplex.platform.servers import service as servers
from loraplex.platform.servers.models import Server
from loraplex.platform.servers.service import ServerInfo
from support.catalog import make_digest, make_tenant
from support.databases import copy_of_migrated_sqlite
from support.upload_room import make_upload_room

CONTENT = bytes(range(100))
NEW = NewUpload(
    adapter_name="bot",
    config_json="{}",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    server_id="a",
    is_in_store=True,
)
BLOCK = b"block"


class FlakyStore(LocalStore):
    """It fails when the test says so."""

    is_down = False

    def put_file(self, *args: Any, **options: Any) -> None:
        if self.is_down:
            raise StoreUnavailable("it is down")
        super().put_file(*args, **options)


@dataclass
class OneServer:
    """The part of a server that takes pushes; its examination reads the whole file."""

    name: str
    folder: Path
    database: Database
    tenant_id: str
    store: FlakyStore
    staging: Staging = field(init=False)
    pushes: Pushes = field(init=False)
    examined: list[bytes] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.control_plane = ControlPlane(self.database, b"secret" * 8)
        self.staging = Staging(self.folder / self.name)
        self.pushes = Pushes(
            info=cast(Any, SimpleNamespace(base_id="base")),
            layout_path=self.folder / "layout.json",
            staging=self.staging,
            room=make_upload_room(self.staging, self.control_plane, server_id=self.name),
            store=self.store,
            control_plane=self.control_plane,
            attestations=cast(Any, SimpleNamespace(add=lambda version: None)),
            served_model_name="base",
            server_id=self.name,
            note_stored=lambda key: None,
            open_tokenizer=lambda added: None,
            is_store_here=False,
        )
        cast(Any, self.pushes)._examiner._examine = self.examine

    def examine(self, upload: Upload) -> IntakeReport:
        self.examined.append(self.staging.weights_path(upload.id).read_bytes())
        self.staging.block_path(upload.id).write_bytes(BLOCK)
        report = FakeReport(
            digest=make_digest("content"),
            base_id="base",
            file_sha256=hashlib.sha256(BLOCK).hexdigest(),
            size_bytes=len(BLOCK),
        )
        return cast(IntakeReport, report)

    async def send(self, upload_id: str, offset: int, content: bytes) -> Upload:
        async def read(_max_bytes: int) -> AsyncIterator[bytes]:
            yield content

        return await self.pushes.receive(self.tenant_id, upload_id, offset=offset, read=read)

    async def commit(self, upload_id: str) -> Pushed:
        return await self.pushes.commit(self.tenant_id, upload_id, BY_SYSTEM)

    def files(self) -> list[Path]:
        return sorted((self.folder / self.name).iterdir())


@dataclass
class FakeReport:
    """What registration reads of a report."""

    digest: str
    base_id: str
    file_sha256: str
    size_bytes: int


@dataclass
class Installation:
    """Servers `a` and `b` on one database and one store."""

    database: Database
    tenant_id: str
    store: FlakyStore
    a: OneServer
    b: OneServer

    def open(self, new: NewUpload = NEW) -> str:
        with self.database.transaction(self.tenant_id) as session:
            return uploads.open_or_resume_upload(session, new).id

    def find(self, upload_id: str) -> Upload:
        with self.database.transaction(self.tenant_id, read_only=True) as session:
            return uploads.get_upload(session, upload_id)

    def parts(self) -> list[str]:
        """The keys of all parts in the store."""
        return [each.key for each in self.store.list_keys("t/") if "/u/" in each.key]

    def see(self, name: str, ago: timedelta = timedelta(0)) -> None:
        """The server was seen so long ago for the last time."""
        info = ServerInfo(id=name, name=name, version="1", base_id="base", started_at=utc_now())
        with self.database.platform_transaction() as session:
            servers.note_seen(session, info)
        with self.database.platform_transaction() as session:
            session.get_one(Server, name).seen_at -= ago


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    monkeypatch.setattr(pushes_module, "ELSEWHERE_SECONDS", 0.01)
    database = Database(copy_of_migrated_sqlite(tmp_path))
    tenant_id = make_tenant(database, "acme").id
    store = FlakyStore(tmp_path / "store")
    a, b = (OneServer(name, tmp_path, database, tenant_id, store) for name in "ab")
    yield Installation(database, tenant_id, store, a, b)
    database.close()


def test_servers_take_parts_by_turns_and_one_examines_the_whole(installation: Installation) -> None:
    a, b = installation.a, installation.b
    upload_id = installation.open()

    async def run() -> Pushed:
        await a.send(upload_id, 0, CONTENT[:30])
        await b.send(upload_id, 30, CONTENT[30:40])
        received = await a.send(upload_id, 40, CONTENT[40:])
        assert received.received_bytes == 100
        return await b.commit(upload_id)

    assert asyncio.run(run()) == Pushed("bot", 1)
    assert (a.examined, b.examined) == ([], [CONTENT])
    assert installation.parts() == []
    assert a.files() == b.files() == []


def test_the_declaration_finds_the_upload_at_another_server(installation: Installation) -> None:
    upload_id = installation.open()
    asyncio.run(installation.a.send(upload_id, 0, CONTENT[:30]))
    assert installation.open(replace(NEW, server_id="b")) == upload_id


def test_an_upload_on_a_servers_disk_is_not_found_elsewhere(installation: Installation) -> None:
    on_disk = replace(NEW, is_in_store=False)
    upload_id = installation.open(on_disk)
    assert installation.open(replace(on_disk, server_id="b")) != upload_id
    with pytest.raises(UploadElsewhere):
        asyncio.run(installation.b.send(upload_id, 0, CONTENT))


def test_of_two_servers_with_the_same_bytes_one_is_acknowledged(installation: Installation) -> None:
    a, b = installation.a, installation.b
    upload_id = installation.open()

    async def run() -> list[Upload | BaseException]:
        arrived = asyncio.Event()

        async def slow(_max_bytes: int) -> AsyncIterator[bytes]:
            yield CONTENT[:40]
            await arrived.wait()

        first = asyncio.create_task(a.pushes.receive(a.tenant_id, upload_id, offset=0, read=slow))
        while not a.files():
            await asyncio.sleep(0.01)
        second = await b.send(upload_id, 0, CONTENT[:60])
        arrived.set()
        return [second, *await asyncio.gather(first, return_exceptions=True)]

    second, first = asyncio.run(run())
    assert isinstance(first, UploadConflict)
    assert first.received_bytes == 60
    assert isinstance(second, Upload)
    (part,) = installation.find(upload_id).stored_parts
    assert part.size_bytes == 60
    assert len(installation.parts()) == 1


def test_what_arrived_of_a_broken_connection_is_acknowledged(installation: Installation) -> None:
    upload_id = installation.open()

    async def broken(_max_bytes: int) -> AsyncIterator[bytes]:
        yield CONTENT[:25]
        raise ConnectionError

    async def run() -> None:
        pushes = installation.a.pushes
        with pytest.raises(ConnectionError):
            await pushes.receive(installation.tenant_id, upload_id, offset=0, read=broken)
        await installation.b.send(upload_id, 25, CONTENT[25:])
        await installation.b.commit(upload_id)

    asyncio.run(run())
    assert installation.b.examined == [CONTENT]


def test_two_commits_at_once_examine_once_and_answer_the_same(installation: Installation) -> None:
    a, b = installation.a, installation.b
    upload_id = installation.open()
    installation.see("a")
    installation.see("b")

    async def run() -> list[Pushed]:
        await a.send(upload_id, 0, CONTENT)
        return list(await asyncio.gather(a.commit(upload_id), b.commit(upload_id)))

    assert asyncio.run(run()) == [Pushed("bot", 1)] * 2
    assert [*a.examined, *b.examined] == [CONTENT]


def test_a_commit_waits_for_a_live_server_and_takes_over_from_a_dead_one(
    installation: Installation,
) -> None:
    a, b = installation.a, installation.b
    upload_id = installation.open()
    asyncio.run(a.send(upload_id, 0, CONTENT))
    with installation.database.transaction(installation.tenant_id) as session:
        uploads.begin_validation(session, upload_id, server_id="a")  # and a is killed
    installation.see("a")

    async def run() -> Pushed:
        committing = asyncio.create_task(b.commit(upload_id))
        await asyncio.sleep(0.1)
        assert not committing.done()
        assert installation.find(upload_id).server_id == "a"
        await asyncio.to_thread(installation.see, "a", timedelta(seconds=servers.LIVE_SECONDS + 1))
        return await committing

    assert asyncio.run(run()) == Pushed("bot", 1)
    assert b.examined == [CONTENT]


def test_a_server_that_was_taken_for_dead_publishes_nothing_twice(
    installation: Installation,
) -> None:
    a, b = installation.a, installation.b
    upload_id = installation.open()

    async def run() -> list[Pushed]:
        await a.send(upload_id, 0, CONTENT)
        real = a.examine

        def examine(upload: Upload) -> IntakeReport:
            report = real(upload)  # meanwhile the other one begins and ends
            assert asyncio.run_coroutine_threadsafe(b.commit(upload_id), loop).result(30)
            return report

        cast(Any, a.pushes)._examiner._examine = examine
        loop = asyncio.get_running_loop()
        return [await a.commit(upload_id), await b.commit(upload_id)]

    assert asyncio.run(run()) == [Pushed("bot", 1)] * 2
    assert (a.examined, b.examined) == ([CONTENT], [CONTENT])
    assert installation.parts() == []


def test_a_failing_server_leaves_the_parts_for_the_next_commit(installation: Installation) -> None:
    a, b = installation.a, installation.b
    upload_id = installation.open()

    async def run() -> Pushed:
        await a.send(upload_id, 0, CONTENT)
        installation.store.is_down = True
        with pytest.raises(StoreUnavailable):
            await a.commit(upload_id)
        assert installation.find(upload_id).state is UploadState.RECEIVING
        assert a.files() == []
        installation.store.is_down = False
        return await b.commit(upload_id)

    assert asyncio.run(run()) == Pushed("bot", 1)


def test_a_server_that_was_taken_for_dead_does_not_reopen_what_another_examines(
    installation: Installation,
) -> None:
    upload_id = installation.open()
    asyncio.run(installation.a.send(upload_id, 0, CONTENT))
    with installation.database.transaction(installation.tenant_id) as session:
        uploads.begin_validation(session, upload_id, server_id="a")
        assert uploads.take_over(session, upload_id, gone_id="a", server_id="b")
        assert not uploads.take_over(session, upload_id, gone_id="a", server_id="c")
        with pytest.raises(InvalidTransition):
            uploads.reopen(session, upload_id, server_id="a")


def test_bytes_that_the_store_does_not_take_are_not_acknowledged(
    installation: Installation,
) -> None:
    upload_id = installation.open()
    installation.store.is_down = True
    with pytest.raises(StoreUnavailable):
        asyncio.run(installation.a.send(upload_id, 0, CONTENT))
    assert installation.find(upload_id).received_bytes == 0
    assert installation.a.files() == []


def test_a_lost_part_is_told(installation: Installation) -> None:
    upload_id = installation.open()

    async def run() -> None:
        await installation.a.send(upload_id, 0, CONTENT[:50])
        await installation.a.send(upload_id, 50, CONTENT[50:])
        installation.store.delete(installation.parts()[0])
        with pytest.raises(ApiError, match="lost; push again") as refused:
            await installation.b.commit(upload_id)
        assert refused.value.code == "intake_failed"
        assert isinstance(refused.value.__cause__, AdapterRejected)

    asyncio.run(run())
    assert installation.find(upload_id).state is UploadState.REJECTED
    assert installation.parts() == []


def test_an_abandoned_upload_has_no_parts(installation: Installation) -> None:
    upload_id = installation.open()

    async def run() -> None:
        await installation.a.send(upload_id, 0, CONTENT[:50])
        assert len(installation.parts()) == 1
        await installation.b.pushes.abandon(installation.tenant_id, upload_id, BY_SYSTEM)

    asyncio.run(run())
    assert installation.parts() == []
    assert installation.find(upload_id).stored_parts == []


def test_the_collection_keeps_the_parts_of_unfinished_uploads_alone(
    installation: Installation,
) -> None:
    """An acknowledgment that the database did not answer leaves a part that nothing names."""
    upload_id = installation.open()
    a = installation.a

    async def run() -> list[str]:
        await a.send(upload_id, 0, CONTENT[:50])
        named = installation.parts()
        write = a.control_plane.write

        async def fail(*_: object) -> Any:
            raise DatabaseUnavailable

        cast(Any, a.control_plane).write = fail
        with pytest.raises(DatabaseUnavailable):
            await a.send(upload_id, 50, CONTENT[50:])
        cast(Any, a.control_plane).write = write
        assert len(installation.parts()) == 2
        garbage = Garbage(
            store=installation.store,
            staging=a.staging,
            control_plane=a.control_plane,
            grace_seconds=-1,
        )
        collected = await garbage.collect()
        await garbage.close()
        assert len(collected.removed_objects) == 1
        return named

    assert asyncio.run(run()) == installation.parts()
    assert asyncio.run(installation.b.send(upload_id, 50, CONTENT[50:])).received_bytes == 100


def test_an_examination_that_nobody_finishes_waits_for_a_commit(installation: Installation) -> None:
    upload_id = installation.open()
    asyncio.run(installation.a.send(upload_id, 0, CONTENT))
    with installation.database.transaction(installation.tenant_id) as session:
        uploads.begin_validation(session, upload_id, server_id="a")
    with installation.database.transaction(installation.tenant_id) as session:
        assert upload_upkeep.mark_lost(session, upload_id) is False
    assert installation.find(upload_id).state is UploadState.RECEIVING
    assert asyncio.run(installation.b.commit(upload_id)) == Pushed("bot", 1)


def test_the_number_of_parts_is_bounded(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_PARTS", 3)
    upload_id = installation.open()

    async def run() -> None:
        for number in range(3):
            await installation.a.send(upload_id, number, CONTENT[number : number + 1])
        with pytest.raises(TooManyParts):
            await installation.a.send(upload_id, 3, CONTENT[3:])

    asyncio.run(run())
    assert len(installation.parts()) == 3


def test_the_largest_adapter_fits_in_parts_of_two_mebibytes() -> None:
    from loraplex.adapters.intake import IntakeLimits

    assert IntakeLimits().max_file_bytes <= upload_part.MAX_PARTS * (2 << 20)
