"""Pushes beside each other, deletions and failures: nothing acknowledged is undone or left held."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, cast

import pytest

from loraplex.adapters.errors import StoreUnavailable
from loraplex.adapters.examination import IntakeReport
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store.base import object_key
from loraplex.adapters.store.local import LocalStore
from loraplex.api.adapters.pushes import Pushed, Pushes
from loraplex.api.adapters.staging import Staging
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.platform.adapters import service, uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.audit.event import BY_SYSTEM, Changed, Origin
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable, UploadConflict
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_digest, make_new_version, make_tenant
from support.databases import copy_of_migrated_sqlite
from support.identity import caller_of
from support.upload_room import make_upload_room

Result = TypeVar("Result")
CONTENT = b"0123456789"
DIGEST = make_digest("content")
NEW = NewUpload(
    adapter_name="bot",
    config_json="{}",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    server_id="here",
)


class SlowControlPlane(ControlPlane):
    """Its reads come to their callers late, when the test says so."""

    gate: asyncio.Event | None = None

    def __init__(self, database: Database, secret: bytes) -> None:
        super().__init__(database, secret)
        self.is_holding = asyncio.Event()
        """A caller waits for the gate."""

    async def read(self, tenant_id: str, query: Callable[[TenantSession], Result]) -> Result:
        gate = self.gate
        result = await super().read(tenant_id, query)
        if gate is not None:
            self.is_holding.set()
            await gate.wait()
        return result


@dataclass
class Server:
    """The part of a server that takes pushes."""

    folder: Path
    database: Database
    tenant_id: str
    control_plane: SlowControlPlane = field(init=False)
    pushes: Pushes = field(init=False)
    staging: Staging = field(init=False)
    store: LocalStore = field(init=False)
    stored: list[AdapterKey] = field(default_factory=list)
    """The adapters whose blocks were reported as stored."""

    def __post_init__(self) -> None:
        self.control_plane = SlowControlPlane(self.database, b"secret" * 8)
        self.staging = Staging(self.folder / "uploads")
        self.store = LocalStore(self.folder / "store")
        self.pushes = Pushes(
            info=cast(Any, SimpleNamespace(base_id="base")),
            layout_path=self.folder / "layout.json",
            staging=self.staging,
            room=make_upload_room(self.staging, self.control_plane),
            store=self.store,
            control_plane=self.control_plane,
            attestations=cast(Any, SimpleNamespace(add=lambda version: None)),
            served_model_name="base",
            server_id="here",
            note_stored=self.stored.append,
            open_tokenizer=lambda added: None,
        )
        cast(Any, self.pushes)._examiner._examine = self._examine

    def _examine(self, upload: Upload) -> IntakeReport:
        """The bytes as they are become the block."""
        self.staging.block_path(upload.id).write_bytes(CONTENT)
        return IntakeReport(
            digest=DIGEST,
            base_id="base",
            file_sha256=NEW.sha256,
            size_bytes=len(CONTENT),
            dtype="F32",
            num_parameters=1,
            num_modules=1,
            min_rank=1,
            max_rank=1,
            targets=("q_proj",),
            delta_norm=1.0,
            largest_deltas=(),
        )

    @property
    def block_key(self) -> str:
        return object_key(AdapterKey(self.tenant_id, DIGEST))

    def open_upload(self) -> str:
        with self.database.transaction(self.tenant_id) as session:
            return uploads.open_upload(session, NEW).id

    async def send(self, upload_id: str, content: bytes) -> None:
        async def read(_max_bytes: int) -> AsyncIterator[bytes]:
            yield content

        await self.pushes.receive(self.tenant_id, upload_id, offset=0, read=read)

    async def commit(self, upload_id: str) -> Pushed:
        return await self.pushes.commit(self.tenant_id, upload_id, BY_SYSTEM)

    async def push(self, upload_id: str) -> Pushed:
        await self.send(upload_id, CONTENT)
        return await self.commit(upload_id)

    def state(self, upload_id: str) -> UploadState:
        with self.database.transaction(self.tenant_id) as session:
            return uploads.get_upload(session, upload_id).state

    def received_bytes(self, upload_id: str) -> int:
        with self.database.transaction(self.tenant_id) as session:
            return uploads.get_upload(session, upload_id).received_bytes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    yield Server(tmp_path, database, make_tenant(database, "acme").id)
    database.close()


def test_a_repeated_part_does_not_cut_off_what_the_first_one_acknowledged(server: Server) -> None:
    """A sender gave up waiting and sends the same part again while the first still arrives."""
    upload_id = server.open_upload()

    async def run() -> None:
        plane = server.control_plane
        began, arrived = asyncio.Event(), asyncio.Event()

        async def slow(_max_bytes: int) -> AsyncIterator[bytes]:
            yield CONTENT[:8]
            began.set()
            await arrived.wait()

        first = asyncio.create_task(
            server.pushes.receive(server.tenant_id, upload_id, offset=0, read=slow)
        )
        await began.wait()
        plane.gate = gate = asyncio.Event()
        again = asyncio.create_task(server.send(upload_id, CONTENT[:3]))
        await plane.is_holding.wait()
        plane.gate = None
        arrived.set()
        await first
        gate.set()
        with pytest.raises(UploadConflict):
            await again

    asyncio.run(run())
    assert server.received_bytes(upload_id) == 8
    assert server.staging.weights_path(upload_id).read_bytes() == CONTENT[:8]


def test_a_commit_that_comes_when_another_ends_has_the_same_answer(server: Server) -> None:
    upload_id = server.open_upload()

    async def run() -> Pushed:
        await server.send(upload_id, CONTENT)
        with server.database.transaction(server.tenant_id) as session:
            uploads.begin_validation(session, upload_id)
        server.control_plane.gate = gate = asyncio.Event()
        committing = asyncio.create_task(server.commit(upload_id))
        await server.control_plane.is_holding.wait()
        server.control_plane.gate = None
        with server.database.transaction(server.tenant_id) as session:
            version, _ = service.create_version(session, make_new_version("bot", "content"))
            uploads.mark_accepted(session, upload_id, version.id)
        server.staging.discard(upload_id)
        gate.set()
        return await committing

    assert asyncio.run(run()) == Pushed("bot", 1)


def test_content_that_a_deletion_removes_before_it_has_a_version_is_stored_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_block_before_each_version(server, monkeypatch)
    upload_id = server.open_upload()
    assert asyncio.run(server.push(upload_id)) == Pushed("bot", 1)
    assert server.store.exists(server.block_key)


def test_a_push_is_accepted_only_once_the_store_was_found_to_have_its_block(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_block_before_each_version(server, monkeypatch)
    upload_id = server.open_upload()
    with monkeypatch.context() as outage:
        outage.setattr(server.store, "exists", fail_to_answer)
        with pytest.raises(StoreUnavailable):
            asyncio.run(server.push(upload_id))
    assert server.state(upload_id) is UploadState.RECEIVING
    assert server.stored == []

    assert asyncio.run(server.commit(upload_id)) == Pushed("bot", 1)
    assert server.state(upload_id) is UploadState.ACCEPTED
    assert server.store.exists(server.block_key)
    assert server.stored == [AdapterKey(server.tenant_id, DIGEST)]


def test_a_push_that_stops_after_its_version_was_registered_is_finished_at_the_next_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = server.open_upload()

    async def lose(*_: object) -> NoReturn:
        raise DatabaseUnavailable

    async def recover() -> None:
        await server.pushes.recover()
        await asyncio.gather(*server.pushes._validations.values())

    with monkeypatch.context() as stop:
        stop.setattr(server.pushes._records, "accept", lose)
        with pytest.raises(DatabaseUnavailable):
            asyncio.run(server.push(upload_id))
    server.store.delete(server.block_key)
    asyncio.run(recover())
    assert server.state(upload_id) is UploadState.ACCEPTED
    assert server.store.exists(server.block_key)


def remove_block_before_each_version(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion of the same content ends between a push's two steps."""
    add_version = server.pushes._records.add_version

    async def add_late(upload: Upload, report: IntakeReport, origin: Origin) -> str:
        server.store.delete(server.block_key)
        return await add_version(upload, report, origin)

    monkeypatch.setattr(server.pushes._records, "add_version", add_late)


def fail_to_answer(key: str) -> NoReturn:
    raise StoreUnavailable("the adapter store does not answer")


def test_a_push_that_the_database_did_not_take_holds_no_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, budget = server.control_plane, server.pushes._room.budget
    held: list[int] = []

    async def lose(
        tenant_id: str, origin: Origin, change: Callable[[TenantSession], Changed[Result]]
    ) -> Result:
        def fail(session: TenantSession) -> Changed[Result]:
            change(session)
            held.append(budget.held_bytes)
            raise DatabaseUnavailable

        return await ControlPlane.change(plane, tenant_id, origin, fail)

    monkeypatch.setattr(plane, "change", lose)
    caller = caller_of(Tenant(id=server.tenant_id, slug="acme"))
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(server.pushes.open(caller, NEW, BY_SYSTEM, declared_base_id=None))
    assert held == [NEW.num_bytes]
    assert budget.held_bytes == 0
