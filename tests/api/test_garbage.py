"""Unreferenced objects are collected; those of a version, an upload or a running push are not."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
from sqlalchemy import make_url, select

from loraplex.adapters.errors import StoreUnavailable
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import checkpoint_key, file_key, object_key
from loraplex.adapters.store.local import LocalStore
from loraplex.api.adapters.staging import Staging
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.upkeep.garbage import Collected, Garbage
from loraplex.platform.adapters import service, uploads, wishes
from loraplex.platform.adapters.models import AdapterWish
from loraplex.platform.adapters.states import UploadState, WishKind
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.base import utc_now
from loraplex.platform.batches import files
from loraplex.platform.batches.file_models import FilePurpose, StoredFile
from loraplex.platform.batches.models import Batch
from loraplex.platform.batches.states import BatchState
from loraplex.platform.database import Database
from loraplex.platform.responses.models import StoredResponse
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tuning.models import StoredCheckpoint, TuningJob
from loraplex.platform.tuning.states import JobState
from support.catalog import make_digest, make_new_version, make_tenant, make_version
from support.databases import copy_of_migrated_sqlite

Result = TypeVar("Result")

OLD_SECONDS = 30 * 24 * 3600


@dataclass
class Installation:
    """A catalog, a store and staged uploads, without a server."""

    home: Path
    database: Database
    store: LocalStore
    staging: Staging
    tenant_id: str

    def collect(self, *, dry_run: bool = False) -> Collected:
        return self.run(lambda garbage: garbage.collect(dry_run=dry_run))

    def start(self) -> None:
        """What a server does at its start."""
        self.run(lambda garbage: garbage.sweep_at_start())

    def run(self, work: Callable[[Garbage], Awaitable[Result]]) -> Result:
        garbage = Garbage(
            store=self.store,
            staging=self.staging,
            control_plane=ControlPlane(self.database, b"secret" * 8),
        )

        async def run() -> Result:
            try:
                return await work(garbage)
            finally:
                await garbage.close()

        return asyncio.run(run())

    def put_object(self, content: str, *, is_old: bool = True, tenant_id: str = "") -> str:
        """An object of this content, under its key, as a push leaves it."""
        key = object_key(AdapterKey(tenant_id or self.tenant_id, make_digest(content)))
        source = self.home / "object"
        source.write_text(content)
        self.store.put_file(key, source, sha256="")
        if is_old:
            self.make_old(self.home / "store" / key)
        return key

    def add_version(self, name: str, content: str) -> None:
        with self.database.transaction(self.tenant_id) as session:
            service.create_version(session, make_new_version(name, content))

    def is_database_locked(self) -> bool:
        """Whether a unit of work keeps every other writer waiting."""
        path = make_url(self.database._url).database
        assert path is not None
        with closing(sqlite3.connect(path, timeout=0.0)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
        return False

    def open_upload(self, name: str) -> str:
        declared = NewUpload(
            adapter_name=name, config_json="{}", size_bytes=9, sha256="0" * 64, server_id="here"
        )
        with self.database.transaction(self.tenant_id) as session:
            return uploads.open_upload(session, declared).id

    def stage(self, upload_id: str, *, is_old: bool = True) -> Path:
        path = self.staging.weights_path(upload_id)
        path.write_bytes(b"part")
        if is_old:
            self.make_old(path)
        return path

    def make_old(self, path: Path) -> None:
        then = time.time() - OLD_SECONDS
        os.utime(path, (then, then))


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    tenant = make_tenant(database, "acme")
    store, staging = LocalStore(tmp_path / "store"), Staging(tmp_path / "uploads")
    yield Installation(tmp_path, database, store, staging, tenant.id)
    staging.close()
    database.close()


def test_a_start_removes_at_once_the_files_that_a_killed_server_left(
    installation: Installation,
) -> None:
    waiting = installation.stage(installation.open_upload("waiting"), is_old=False)
    left = installation.stage("no-upload-of-this-id", is_old=False)
    installation.start()
    assert waiting.exists(), "its owner may send the rest"
    assert not left.exists()


def test_objects_that_no_version_names_are_removed_and_the_named_ones_stay(
    installation: Installation,
) -> None:
    installation.add_version("bot", "wanted")
    wanted = installation.put_object("wanted")
    strays = [installation.put_object(content) for content in ("stray", "another")]

    collected = installation.collect()

    assert collected.num_objects == 3
    assert set(collected.removed_objects) == set(strays)
    assert collected.removed_bytes == len("stray") + len("another")
    assert installation.store.exists(wanted)
    assert not any(map(installation.store.exists, strays))
    assert installation.collect().removed_objects == []


def test_equal_bytes_of_another_tenant_do_not_keep_an_object(installation: Installation) -> None:
    other = make_tenant(installation.database, "globex")
    installation.add_version("bot", "shared")
    mine = installation.put_object("shared")
    theirs = installation.put_object("shared", tenant_id=other.id)

    assert installation.collect().removed_objects == [theirs]
    assert installation.store.exists(mine)


def test_young_objects_and_files_may_belong_to_a_push_under_way(
    installation: Installation,
) -> None:
    key = installation.put_object("young", is_old=False)
    path = installation.stage("no-row", is_old=False)

    collected = installation.collect()

    assert collected.removed_objects == collected.removed_files == []
    assert installation.store.exists(key)
    assert path.exists()


def test_what_is_not_an_adapters_block_is_left_alone(installation: Installation) -> None:
    strange = installation.home / "store" / "t" / "acme" / "notes.txt"
    strange.parent.mkdir(parents=True)
    strange.write_text("the operator's")
    installation.make_old(strange)

    assert installation.collect().removed_objects == []
    assert strange.exists()


def test_a_version_that_came_after_the_rows_were_read_keeps_its_object(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = installation.put_object("late")
    named = "list_stored_contents_of_all_tenants"
    monkeypatch.setattr(f"loraplex.platform.adapters.repository.{named}", lambda session: set())
    installation.add_version("bot", "late")

    assert installation.collect().removed_objects == []
    assert installation.store.exists(key)


def test_a_version_that_came_after_the_last_look_at_its_content_keeps_its_object(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = installation.put_object("late")
    read = ControlPlane.read

    async def read_and_push(
        plane: ControlPlane, tenant_id: str, query: Callable[[TenantSession], Result]
    ) -> Result:
        found = await read(plane, tenant_id, query)
        installation.add_version("bot", "late")
        return found

    monkeypatch.setattr(ControlPlane, "read", read_and_push)
    assert installation.collect().removed_objects == []
    assert installation.store.exists(key)


def test_no_version_of_a_content_is_created_while_its_object_is_removed(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = installation.put_object("stray")
    delete = installation.store.delete

    def delete_locked(stored_key: str) -> None:
        assert installation.is_database_locked()
        delete(stored_key)

    monkeypatch.setattr(installation.store, "delete", delete_locked)
    assert installation.collect().removed_objects == [key]
    assert not installation.is_database_locked()


def test_a_store_that_does_not_answer_is_noticed_before_anything_is_locked(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.put_object("stray")
    was_held: list[bool] = []

    def fail(stored_key: str) -> NoReturn:
        was_held.append(installation.is_database_locked())
        raise StoreUnavailable("the adapter store does not answer")

    for call in ("exists", "delete"):
        monkeypatch.setattr(installation.store, call, fail)
    with pytest.raises(StoreUnavailable):
        installation.collect()
    assert was_held == [False]


def test_files_without_an_unfinished_upload_go(installation: Installation) -> None:
    waiting = installation.stage(installation.open_upload("bot"))
    stray = installation.stage("unknown")

    collected = installation.collect()

    assert collected.removed_files == ["unknown"]
    assert waiting.exists()
    assert not stray.exists()


def test_uploads_that_were_given_up_are_abandoned_and_their_files_go(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = installation.open_upload("bot")
    path = installation.stage(upload_id)
    later = utc_now() + timedelta(seconds=OLD_SECONDS)
    monkeypatch.setattr("loraplex.api.upkeep.garbage.utc_now", lambda: later)

    collected = installation.collect()

    assert collected.abandoned_uploads == [upload_id]
    assert not path.exists()
    with installation.database.transaction(installation.tenant_id) as session:
        assert uploads.get_upload(session, upload_id).state is UploadState.ABANDONED


def test_an_upload_may_be_silent_for_days(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installation.stage(installation.open_upload("bot"))
    later = utc_now() + timedelta(days=6)
    monkeypatch.setattr("loraplex.api.upkeep.garbage.utc_now", lambda: later)

    assert installation.collect().abandoned_uploads == []
    assert path.exists()


def test_transfers_to_the_store_are_removed_when_no_push_can_still_run(
    installation: Installation,
) -> None:
    old, young = (installation.home / "store" / ".incoming" / name for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"part")
    installation.make_old(old)

    assert installation.collect().abandoned_transfers == 1
    assert young.exists()
    assert not old.exists()


def test_expired_wishes_are_removed(installation: Installation) -> None:
    with installation.database.transaction(installation.tenant_id) as session:
        make_version(session, "bot")
        long_ago = utc_now() - timedelta(seconds=OLD_SECONDS)
        wishes.set_wish(session, "bot", 1, WishKind.PIN, ttl_seconds=1.0, now=long_ago)
        wishes.set_wish(session, "bot", 1, WishKind.PREFETCH)

    installation.collect()

    with installation.database.platform_transaction() as platform:
        assert list(platform.scalars(select(AdapterWish.kind))) == [WishKind.PREFETCH]


def test_a_dry_run_finds_the_same_and_removes_nothing(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = installation.put_object("stray")
    path = installation.stage("unknown")
    upload_id = installation.open_upload("bot")
    later = utc_now() + timedelta(seconds=OLD_SECONDS)
    monkeypatch.setattr("loraplex.api.upkeep.garbage.utc_now", lambda: later)

    planned = installation.collect(dry_run=True)

    assert installation.store.exists(key)
    assert path.exists()
    done = installation.collect()
    assert planned.removed_objects == done.removed_objects == [key]
    assert planned.removed_files == done.removed_files == ["unknown"]
    assert planned.abandoned_uploads == done.abandoned_uploads == [upload_id]


def add_file(installation: Installation, *, is_expired: bool, tenant_id: str) -> tuple[str, str]:
    """A file with bytes in the store: its id and its object."""
    now = utc_now()
    file = StoredFile(
        id=files.new_file_id(),
        purpose=FilePurpose.BATCH,
        filename="in.jsonl",
        size_bytes=1,
        sha256="0" * 64,
        created_at=now - timedelta(days=2),
        expires_at=now + timedelta(days=-1 if is_expired else 1),
    )
    with installation.database.transaction(tenant_id) as session:
        session.add(file)
    key = file_key(tenant_id, file.id, file.sha256)
    put_old_object(installation, key)
    return file.id, key


def put_old_object(installation: Installation, key: str) -> None:
    path = installation.home / "store" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    installation.make_old(path)


def test_files_go_when_they_expire_and_so_do_objects_that_no_file_names(
    installation: Installation,
) -> None:
    tenant_id = installation.tenant_id
    kept, kept_key = add_file(installation, is_expired=False, tenant_id=tenant_id)
    expired, _ = add_file(installation, is_expired=True, tenant_id=tenant_id)
    orphan_key = file_key(tenant_id, "file-orphan", "0" * 64)
    put_old_object(installation, orphan_key)
    assert installation.collect(dry_run=True).expired_files == [expired]
    collected = installation.collect()
    assert (collected.expired_files, collected.removed_objects) == ([expired], [orphan_key])
    assert [stored.key for stored in installation.store.list_keys("t/")] == [kept_key]
    with installation.database.transaction(tenant_id, read_only=True) as session:
        assert list(session.scalars(select(StoredFile.id))) == [kept]


def test_a_fine_tuning_job_goes_when_it_ended_long_ago(installation: Installation) -> None:
    ended_at = {
        "ftjob-open": None,
        "ftjob-new": utc_now() - timedelta(days=29),
        "ftjob-old": utc_now() - timedelta(days=31),
    }
    with installation.database.transaction(installation.tenant_id) as session:
        for job_id, moment in ended_at.items():
            session.add(
                TuningJob(
                    id=job_id,
                    adapter_name="bot",
                    created_by="key:ci",
                    training_file_id="file-1",
                    training_sha256="0" * 64,
                    recipe={},
                    state=JobState.PAUSED if moment is None else JobState.CANCELLED,
                    ended_at=moment,
                )
            )
    installation.collect()
    with installation.database.transaction(installation.tenant_id, read_only=True) as session:
        assert set(session.scalars(select(TuningJob.id))) == {"ftjob-open", "ftjob-new"}


def test_checkpoints_that_no_job_names_are_removed_and_named_ones_stay(
    installation: Installation,
) -> None:
    tenant_id = installation.tenant_id
    with installation.database.transaction(tenant_id) as session:
        session.add(
            TuningJob(
                id="ftjob-open",
                adapter_name="bot",
                created_by="key:ci",
                training_file_id="file-1",
                training_sha256="0" * 64,
                recipe={},
                state=JobState.PAUSED,
            )
        )
        session.flush()
        session.add(
            StoredCheckpoint(
                id="ftckpt-kept",
                job_id="ftjob-open",
                step=4,
                sha256="0" * 64,
                size_bytes=1,
                runtime_id="sha256:0",
            )
        )
    kept, lost = (
        checkpoint_key(tenant_id, f"ftckpt-{name}", "0" * 64) for name in ("kept", "lost")
    )
    for key in (kept, lost):
        put_old_object(installation, key)
    assert installation.collect().removed_objects == [lost]
    assert installation.store.exists(kept)


def test_a_file_that_an_open_batch_reads_stays_beyond_its_time(installation: Installation) -> None:
    tenant_id = installation.tenant_id
    expired, _ = add_file(installation, is_expired=True, tenant_id=tenant_id)
    with installation.database.transaction(tenant_id) as session:
        batch = Batch(
            id="batch_1",
            key_id="key",
            endpoint="/v1/completions",
            input_file_id=expired,
            state=BatchState.IN_PROGRESS,
            created_at=utc_now(),
            expires_at=utc_now(),
        )
        session.add(batch)
    assert installation.collect().expired_files == []
    with installation.database.transaction(tenant_id) as session:
        found = session.get_one(Batch, "batch_1")
        found.state, found.ended_at = BatchState.COMPLETED, utc_now() - timedelta(days=31)
    assert installation.collect().expired_files == [expired]
    with installation.database.transaction(tenant_id, read_only=True) as session:
        assert session.scalars(select(Batch)).all() == []


def test_stored_responses_go_when_they_expire(installation: Installation) -> None:
    now = utc_now()
    with installation.database.transaction(installation.tenant_id) as session:
        for name, days in (("expired", -1), ("kept", 1)):
            response = StoredResponse(
                id=name,
                size_bytes=4,
                expires_at=now + timedelta(days=days),
                input=b"[]",
                response=b"{}",
            )
            session.add(response)
    assert installation.collect(dry_run=True).expired_responses == 1
    assert installation.collect().expired_responses == 1
    with installation.database.transaction(installation.tenant_id, read_only=True) as session:
        assert list(session.scalars(select(StoredResponse.id))) == ["kept"]
    assert installation.collect().expired_responses == 0
