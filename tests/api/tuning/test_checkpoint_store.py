"""Checkpoints in the object store: what another server finds when a job's server is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.adapters.errors import StoreUnavailable
from loraplex.adapters.store.local import LocalStore
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.leases import Leases
from loraplex.api.tuning import checkpoint_uploads, tuning
from loraplex.api.tuning.checkpoint_store import CheckpointStore
from loraplex.api.tuning.checkpoint_uploads import CheckpointUploads
from loraplex.api.tuning.work_folders import WorkFolder, WorkFolders
from loraplex.engine.tuning.checkpoint_files import CheckpointFile, list_checkpoints
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import QuotaExceeded
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.tuning import service
from loraplex.platform.tuning.models import StoredCheckpoint, TuningEvent, TuningJob
from loraplex.platform.tuning.states import JobState, PauseReason
from support.catalog import make_tenant
from support.checkpoints import make_checkpoint_store
from support.fake_trainer import State, read_state, write_state
from support.limits import limit
from support.waiting import wait_for

OTHER_RUNTIME = f"sha256:{1:064x}"


@dataclass
class Place:
    """Two servers with one database and one store."""

    home: Path
    database: Database
    control_plane: ControlPlane
    first: CheckpointStore
    second: CheckpointStore
    tenant: Tenant
    job: TuningJob

    def folder(self, server: str, job_id: str = "ftjob-1") -> WorkFolder:
        folder = WorkFolder(self.home / server / job_id)
        folder.make()
        return folder

    def checkpoint(self, step: int, server: str = "first") -> CheckpointFile:
        """In this server's folder."""
        folder = self.folder(server)
        write_state(folder.checkpoints, State(step, 10 * step))
        return list_checkpoints(folder.checkpoints)[0]

    def put(self, *steps: int) -> None:
        for step in steps:
            asyncio.run(self.first.put(self.job, self.checkpoint(step)))

    def lay(self, server: CheckpointStore | None = None) -> list[State]:
        """The states in the second server's folder, the newest first."""
        folder = self.folder("second")
        asyncio.run((server or self.second).lay(self.job, folder))
        return [read_state(found.path) for found in list_checkpoints(folder.checkpoints)]

    def objects(self) -> list[Path]:
        """The files of the store, by age."""
        found = (self.home / "store" / "t").rglob("*")
        return sorted(filter(Path.is_file, found), key=lambda path: path.stat().st_mtime_ns)

    def stored_steps(self) -> list[int]:
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            return sorted(session.scalars(select(StoredCheckpoint.step)))

    def change(self, change: Callable[[TenantSession, TuningJob], None]) -> None:
        with self.database.transaction(self.tenant.id) as session:
            change(session, session.get_one(TuningJob, self.job.id))


def add_job(database: Database, tenant: Tenant, job_id: str) -> TuningJob:
    with database.transaction(tenant.id) as session:
        job = TuningJob(
            id=job_id,
            adapter_name="bot",
            created_by="key:ci",
            training_file_id="file-1",
            training_sha256="0" * 64,
            recipe={},
            state=JobState.RUNNING,
            server_id="first",
            created_at=utc_now(),
        )
        session.add(job)
    return job


@pytest.fixture
def place(database: Database, tmp_path: Path) -> Iterator[Place]:
    control_plane = ControlPlane(database, b"s" * 32)
    first, second = (
        make_checkpoint_store(control_plane, tmp_path / "store", server_id=server)
        for server in ("first", "second")
    )
    tenant = make_tenant(database, "acme")
    job = add_job(database, tenant, "ftjob-1")
    yield Place(tmp_path, database, control_plane, first, second, tenant, job)
    for store in (first, second):
        store.close()
    control_plane.close()


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_another_server_gets_the_newest_checkpoint_byte_by_byte(place: Place) -> None:
    place.put(4, 8)
    assert place.lay() == [State(8, 80)]
    here, there = (
        list_checkpoints(place.folder(server).checkpoints)[0] for server in ("first", "second")
    )
    assert here.path.read_bytes() == there.path.read_bytes()
    assert not place.folder("second").incoming.exists()


@pytest.mark.parametrize("damage", [flip_last_byte, cut, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_and_removed(
    place: Place, damage: Callable[[Path], None]
) -> None:
    place.put(4, 8)
    damage(place.objects()[-1])
    assert place.lay() == [State(4, 40)]
    assert place.stored_steps() == [4]
    assert len(place.objects()) == 1
    with place.database.transaction(place.tenant.id, read_only=True) as session:
        (message,) = session.scalars(select(TuningEvent.message))
    assert message == "The stored checkpoint of step 8 is damaged and was removed."


def test_if_both_are_damaged_the_job_begins_anew(place: Place) -> None:
    place.put(4, 8)
    for path in place.objects():
        flip_last_byte(path)
    assert place.lay() == []
    assert (place.stored_steps(), place.objects()) == ([], [])


def test_a_store_that_does_not_answer_damages_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put(4)

    def fail(*_args: Any, **_more: Any) -> None:
        raise StoreUnavailable("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "fetch_file", fail)
        with pytest.raises(StoreUnavailable):
            place.lay()
    assert place.lay() == [State(4, 40)]


def test_the_last_two_checkpoints_of_a_job_are_kept(place: Place) -> None:
    other = add_job(place.database, place.tenant, "ftjob-2")
    place.put(4, 8)
    asyncio.run(place.first.put(other, place.checkpoint(12)))
    place.put(16, 20)
    assert place.stored_steps() == [12, 16, 20]
    assert len(place.objects()) == 3


def test_a_checkpoint_that_is_stored_already_is_not_sent_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is resumed and paused again without a step more has the same checkpoint."""
    place.put(4, 8)
    with monkeypatch.context() as patch:
        patch.delattr(LocalStore, "put_file")
        place.put(8)
    assert place.stored_steps() == [4, 8]


def test_a_checkpoint_of_the_folder_that_is_as_new_is_used(place: Place) -> None:
    place.put(4)
    write_state(place.folder("second").checkpoints, State(6, 60))
    assert place.lay() == [State(6, 60)]


def test_a_damaged_checkpoint_of_the_folder_gives_way_to_the_stored_one(place: Place) -> None:
    place.put(4)
    flip_last_byte(write_state(place.folder("second").checkpoints, State(6, 60)))
    assert place.lay() == [State(4, 40)]


def test_a_checkpoint_of_a_base_with_other_values_is_not_used(place: Place) -> None:
    place.put(4)
    other = make_checkpoint_store(
        place.control_plane, place.home / "store", runtime_id=OTHER_RUNTIME
    )
    assert place.lay(other) == []
    other.close()
    assert place.stored_steps() == [4], "its own servers may use it"


def test_servers_whose_base_has_other_values_keep_their_own_checkpoints(place: Place) -> None:
    """A job that begins anew there is behind the checkpoints that it cannot use."""
    place.put(16, 20)
    place.change(take_over)
    other = make_checkpoint_store(
        place.control_plane, place.home / "store", server_id="second", runtime_id=OTHER_RUNTIME
    )
    for step in (4, 8, 12):
        asyncio.run(other.put(place.job, place.checkpoint(step, "second")))
    other.close()
    assert place.stored_steps() == [8, 12, 16, 20]


def cancel(session: TenantSession, job: TuningJob) -> None:
    job.state, job.ended_at = JobState.CANCELLED, utc_now()


def take_over(session: TenantSession, job: TuningJob) -> None:
    service.begin(session, job.id, "second")


def delete(session: TenantSession, job: TuningJob) -> None:
    cancel(session, job)
    session.flush()
    service.remove_ended(session, "bot")


@pytest.mark.parametrize("change", [cancel, take_over, delete])
def test_a_checkpoint_that_comes_too_late_leaves_nothing(
    place: Place, change: Callable[[TenantSession, TuningJob], None]
) -> None:
    """Its job ended, got another server or was deleted while it was sent."""
    place.change(change)
    place.put(4)
    assert (place.stored_steps(), place.objects()) == ([], [])


def test_the_checkpoints_of_jobs_that_have_ended_are_removed_and_others_stay(place: Place) -> None:
    other = add_job(place.database, place.tenant, "ftjob-2")
    place.put(4, 8)
    asyncio.run(place.first.put(other, place.checkpoint(12)))
    asyncio.run(place.second.remove_needless())
    assert place.stored_steps() == [4, 8, 12]
    place.change(cancel)
    asyncio.run(place.second.remove_needless())
    assert place.stored_steps() == [12]
    assert len(place.objects()) == 1


def test_checkpoints_stay_within_the_limit_of_stored_bytes(place: Place) -> None:
    size = place.checkpoint(4).path.stat().st_size
    limit(place.database, place.tenant.id, stored_bytes=2 * size + 50)
    place.put(4, 8, 12)
    assert place.stored_steps() == [8, 12], "those that are replaced need no room"
    other = add_job(place.database, place.tenant, "ftjob-2")
    with pytest.raises(QuotaExceeded):
        asyncio.run(place.first.put(other, place.checkpoint(16)))
    assert place.stored_steps() == [8, 12]
    assert len(place.objects()) == 2


# --- when they are stored -------------------------------------------------------------------------


@asynccontextmanager
async def uploading(place: Place) -> AsyncIterator[CheckpointUploads]:
    uploads = CheckpointUploads(place.first, place.job, place.folder("first"))
    async with uploads.running():
        yield uploads


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


def test_the_first_checkpoint_is_stored_at_once_and_then_the_newest_after_a_while(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_uploads, "STORE_SECONDS", 1.0)

    async def store() -> None:
        async with uploading(place) as uploads:
            place.checkpoint(4)
            uploads.note()
            await until(lambda: place.stored_steps() == [4])
            for step in (8, 12, 16):
                place.checkpoint(step)
                uploads.note()
            await until(lambda: place.stored_steps() != [4])
            assert place.stored_steps() == [4, 16]

    asyncio.run(store())
    assert not place.folder("first").outgoing.exists()


def test_what_is_not_stored_when_a_trainer_ends_is_stored_for_a_paused_job(place: Place) -> None:
    async def store() -> None:
        async with uploading(place) as uploads:
            place.checkpoint(4)
            uploads.note()
            await until(lambda: place.stored_steps() == [4])
            place.checkpoint(8)
            uploads.note()
        assert place.stored_steps() == [4]
        await uploads.store_last()
        await uploads.store_last()
        assert place.stored_steps() == [4, 8]

    asyncio.run(store())


def test_a_failure_to_store_is_repeated(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_uploads, "RETRY_SECONDS", 0.05)
    put, failures = LocalStore.put_file, iter(range(2))

    def fail_twice(*args: Any, **more: Any) -> None:
        if next(failures, None) is not None:
            raise StoreUnavailable("the store does not answer")
        put(*args, **more)

    monkeypatch.setattr(LocalStore, "put_file", fail_twice)

    async def store() -> None:
        async with uploading(place) as uploads:
            place.checkpoint(4)
            uploads.note()
            await until(lambda: place.stored_steps() == [4])

    asyncio.run(store())
    assert next(failures, None) is None


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(place: Place) -> None:
    """A trainer could make the server read another file."""
    secret = place.home / "secret"
    secret.write_text("secret")
    name = place.checkpoint(4).path
    name.unlink()
    name.symlink_to(secret)

    async def store() -> None:
        uploads = CheckpointUploads(place.first, place.job, place.folder("first"))
        await uploads.store_last()

    asyncio.run(store())
    assert place.objects() == []
    assert list_checkpoints(place.folder("first").checkpoints) == []


def test_a_store_that_is_slow_to_delete_holds_up_no_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put(4)
    place.change(cancel)
    waiting = add_job(place.database, place.tenant, "ftjob-2")
    begun, may_go_on, delete = Event(), Event(), LocalStore.delete

    def delete_slowly(store: LocalStore, key: str) -> None:
        begun.set()
        assert may_go_on.wait(60)
        delete(store, key)

    monkeypatch.setattr(LocalStore, "delete", delete_slowly)
    monkeypatch.setattr(tuning, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(tuning, "memory_lines", lambda *_: [])

    def wait_for_budget() -> None:
        with place.database.transaction(place.tenant.id) as session:
            job = session.get_one(TuningJob, waiting.id)
            job.state, job.pause_reason = JobState.PAUSED, PauseReason.BUDGET

    def is_resumed() -> bool:
        with place.database.transaction(place.tenant.id, read_only=True) as session:
            return service.get_job(session, waiting.id).state is JobState.QUEUED

    async def scenario() -> None:
        services: Any = SimpleNamespace(
            control_plane=place.control_plane,
            server_id="first",
            folders=WorkFolders(place.home / "folders"),
            checkpoints=place.first,
            trainers=SimpleNamespace(engine=SimpleNamespace(info=None), place=None),
        )
        leases = Leases(place.control_plane, "first")
        jobs = tuning.Tuning(services, leases=leases, max_jobs=0, is_draining=lambda: False)
        jobs.start()
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            wait_for_budget()
            await asyncio.to_thread(wait_for, is_resumed)
            assert place.objects(), "it is not deleted yet"
        finally:
            may_go_on.set()
        await asyncio.to_thread(wait_for, lambda: not place.objects())
        await jobs.close()

    asyncio.run(scenario())
