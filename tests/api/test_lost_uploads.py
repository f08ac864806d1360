"""Uploads whose server does not return are closed; a server that returns late publishes nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport
from loraplex.adapters.store.local import LocalStore
from loraplex.api.adapters.lost_uploads import PATIENCE, end_lost_uploads
from loraplex.api.adapters.pushes import Pushes
from loraplex.api.adapters.staging import Staging
from loraplex.api.contract.errors import ApiError
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.platform.adapters import repository, upload_upkeep, uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.audit import repository as audit
from loraplex.platform.audit.event import BY_SYSTEM
from loraplex.platform.audit.repository import AuditFilter
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.servers import service as servers
from loraplex.platform.servers.models import Server
from loraplex.platform.servers.service import ServerInfo
from support.catalog import make_digest, make_tenant
from support.databases import copy_of_migrated_sqlite
from support.upload_room import make_upload_room

CONTENT = b"0123456789"
LATE = PATIENCE + timedelta(minutes=1)


@dataclass
class Installation:
    """A database whose only server is, or was, `gone`."""

    folder: Path
    database: Database
    tenant_id: str
    control_plane: ControlPlane

    def see(self, ago: timedelta) -> None:
        """The server was seen so long ago for the last time."""
        info = ServerInfo(
            id="gone", name="host", version="1", base_id="base", started_at=utc_now() - ago
        )
        with self.database.platform_transaction() as session:
            servers.note_seen(session, info)
        with self.database.platform_transaction() as session:
            session.get_one(Server, "gone").seen_at -= ago

    def begin_examination(self, ago: timedelta, server_id: str = "gone") -> str:
        """An upload whose bytes have all been there for so long."""
        new = NewUpload(
            adapter_name="bot",
            config_json="{}",
            size_bytes=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            server_id=server_id,
        )
        with self.database.transaction(self.tenant_id) as session:
            upload = uploads.open_upload(session, new)
            uploads.advance_upload(session, upload.id, offset=0, num_bytes=len(CONTENT))
            uploads.begin_validation(session, upload.id).updated_at -= ago
        return upload.id

    def find(self, upload_id: str) -> Upload:
        with self.database.transaction(self.tenant_id, read_only=True) as session:
            return uploads.get_upload(session, upload_id)

    def reap(self) -> None:
        asyncio.run(end_lost_uploads(self.control_plane))

    def pushes(self, examine: Callable[[Upload], IntakeReport]) -> Pushes:
        """What takes pushes of the server `gone`, with another examination."""
        staging = Staging(self.folder / "uploads")
        pushes = Pushes(
            info=cast(Any, SimpleNamespace(base_id="base")),
            layout_path=self.folder / "layout.json",
            staging=staging,
            room=make_upload_room(staging, self.control_plane, server_id="gone"),
            store=LocalStore(self.folder / "store"),
            control_plane=self.control_plane,
            attestations=cast(Any, None),
            served_model_name="base",
            server_id="gone",
            note_stored=lambda key: None,
            open_tokenizer=lambda added: None,
        )
        cast(Any, pushes)._examiner._examine = examine
        return pushes


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    plane = ControlPlane(database, b"secret" * 8)
    yield Installation(tmp_path, database, make_tenant(database, "acme").id, plane)
    plane.close()


def test_an_upload_of_a_server_that_never_returned_fails_with_the_next_step(
    installation: Installation,
) -> None:
    installation.see(LATE)
    upload_id = installation.begin_examination(LATE)
    installation.reap()
    upload = installation.find(upload_id)
    assert (upload.state, upload.reason_code) == (UploadState.REJECTED, "upload_lost")
    assert "Push the adapter again" in (upload.reason_message or "")
    with installation.database.transaction(installation.tenant_id, read_only=True) as session:
        wanted = AuditFilter(resource=upload_id)
        (entry,) = audit.list_entries(session, wanted, after=None, limit=9)
    assert (entry.action, entry.details["reason"]) == ("upload.refuse", "upload_lost")
    installation.reap()  # and once


@pytest.mark.parametrize(
    ("seen", "begun"),
    [
        (timedelta(0), LATE),  # it lives, and has much to examine
        (PATIENCE / 2, LATE),  # it may be starting again
        (LATE, timedelta(0)),  # its sign of life is late, its upload is not
    ],
)
def test_an_upload_that_may_yet_be_examined_is_left_alone(
    installation: Installation, seen: timedelta, begun: timedelta
) -> None:
    installation.see(seen)
    upload_id = installation.begin_examination(begun)
    installation.reap()
    assert installation.find(upload_id).state is UploadState.VALIDATING


def test_a_server_nobody_has_heard_of_has_nothing(installation: Installation) -> None:
    upload_id = installation.begin_examination(LATE, "never seen")
    installation.reap()
    assert installation.find(upload_id).reason_code == "upload_lost"


def accept(upload: Upload) -> IntakeReport:
    return IntakeReport(
        digest=make_digest("weights"),
        base_id="base",
        file_sha256=hashlib.sha256(b"block").hexdigest(),
        size_bytes=5,
        dtype="F32",
        num_parameters=1,
        num_modules=1,
        min_rank=1,
        max_rank=1,
        targets=("q_proj",),
        delta_norm=1.0,
        largest_deltas=(),
    )


def refuse(upload: Upload) -> IntakeReport:
    raise AdapterRejected("digest_mismatch", "The bytes do not have the declared SHA-256.")


@pytest.mark.parametrize("examine", [accept, refuse])
def test_a_server_that_comes_back_during_its_examination_publishes_nothing(
    installation: Installation, examine: Callable[[Upload], IntakeReport]
) -> None:
    upload_id = installation.begin_examination(LATE)

    def examine_late(upload: Upload) -> IntakeReport:
        with installation.database.transaction(installation.tenant_id) as session:
            assert upload_upkeep.mark_lost(session, upload.id)
        return examine(upload)

    pushes = installation.pushes(examine_late)
    (installation.folder / "uploads" / f"{upload_id}.block").write_bytes(b"block")
    with pytest.raises(ApiError) as caught:
        asyncio.run(pushes.commit(installation.tenant_id, upload_id, BY_SYSTEM))
    assert caught.value.code == "upload_lost"
    assert installation.find(upload_id).reason_code == "upload_lost"
    with installation.database.transaction(installation.tenant_id, read_only=True) as session:
        assert repository.find_adapter(session, "bot") is None
    assert not list((installation.folder / "uploads").glob(f"{upload_id}*"))
