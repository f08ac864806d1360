"""The rows of checkpoints whose bytes are in the object store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext

import pytest
from sqlalchemy import select

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import QuotaExceeded
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.tuning import service, stored_checkpoints
from loraplex.platform.tuning.models import StoredCheckpoint, TuningEvent, TuningJob
from loraplex.platform.tuning.service import Happened
from loraplex.platform.tuning.states import JobState
from support.catalog import make_version
from support.databases import wait_until_one_is_blocked
from support.limits import limit

SIZE, RUNTIME, OTHER_RUNTIME = 100, "sha256:1", "sha256:2"


def make_job(session: TenantSession, job_id: str, state: JobState = JobState.RUNNING) -> str:
    job = TuningJob(
        id=job_id,
        adapter_name="bot",
        created_by="key:ci",
        training_file_id="file-1",
        training_sha256="0" * 64,
        recipe={},
        state=state,
        server_id="server-1",
        ended_at=utc_now() if state is JobState.CANCELLED else None,
    )
    session.add(job)
    session.flush()
    return job_id


def make_checkpoint(job_id: str, step: int, runtime_id: str = RUNTIME) -> StoredCheckpoint:
    return StoredCheckpoint(
        id=stored_checkpoints.new_checkpoint_id(),
        job_id=job_id,
        step=step,
        sha256="0" * 64,
        size_bytes=SIZE,
        runtime_id=runtime_id,
        created_at=utc_now(),
    )


def store(session: TenantSession, job_id: str, *steps: int) -> list[int]:
    """Add checkpoints; the steps of those whose objects are to be removed."""
    return [
        needless.step
        for step in steps
        for needless in stored_checkpoints.add(
            session, make_checkpoint(job_id, step), server_id="server-1"
        )
    ]


def steps_of(session: TenantSession, job_id: str) -> list[int]:
    found = stored_checkpoints.list_newest(session, job_id, runtime_id=RUNTIME)
    return [each.step for each in found]


def test_the_two_newest_stay_and_those_before_are_told(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        job_id = make_job(session, "ftjob-1")
        assert store(session, job_id, 4, 8, 12, 16) == [4, 8]
        assert steps_of(session, job_id) == [16, 12]


def test_a_tenant_sees_its_own_alone(database: Database, acme: Tenant, bolt: Tenant) -> None:
    with database.transaction(acme.id) as session:
        store(session, make_job(session, "ftjob-1"), 4)
        (stored,) = session.scalars(select(StoredCheckpoint.id))
        assert stored_checkpoints.exists(session, stored)
    with database.transaction(bolt.id) as session:
        assert not stored_checkpoints.exists(session, stored)
        assert steps_of(session, "ftjob-1") == []
        stored_checkpoints.remove_damaged(session, stored)
        (foreign,) = stored_checkpoints.add(
            session, make_checkpoint("ftjob-1", 8), server_id="server-1"
        )
        assert foreign.step == 8, "there is no such job"
    with database.transaction(acme.id) as session:
        assert steps_of(session, "ftjob-1") == [4]


def test_the_limit_counts_adapters_and_all_checkpoints_but_those_that_are_replaced(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, "bot")
        first, second = (make_job(session, f"ftjob-{number}") for number in (1, 2))
        store(session, first, 4, 8)
        store(session, second, 4)
        used = version.size_bytes + 3 * SIZE
    for room, job_id, runtime_id, fits in (
        (used, first, RUNTIME, True),  # instead of its older one
        (used, first, OTHER_RUNTIME, False),
        (used + SIZE, first, OTHER_RUNTIME, True),
        (used, second, RUNTIME, False),
        (used + SIZE, second, RUNTIME, True),
    ):
        limit(database, acme.id, stored_bytes=room)
        with database.transaction(acme.id) as session:
            refused = nullcontext() if fits else pytest.raises(QuotaExceeded)
            with refused:
                stored_checkpoints.check_room(session, job_id, SIZE, runtime_id=runtime_id)


def test_those_of_ended_jobs_are_taken_once(database: Database, acme: Tenant, bolt: Tenant) -> None:
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            for name in ("open", "ended"):
                store(session, make_job(session, f"ftjob-{tenant.slug}-{name}"), 4, 8)
            job = session.get_one(TuningJob, f"ftjob-{tenant.slug}-ended")
            job.state, job.ended_at = JobState.CANCELLED, utc_now()
    with database.platform_transaction() as session:
        assert stored_checkpoints.has_needless(session)
        taken = stored_checkpoints.take_needless(session)
        assert sorted((each.tenant_id, each.step) for each in taken) == sorted(
            (tenant.id, step) for tenant in (acme, bolt) for step in (4, 8)
        )
    with database.platform_transaction() as session:
        assert not stored_checkpoints.has_needless(session)
        assert stored_checkpoints.take_needless(session) == []
        assert len(stored_checkpoints.list_of_all_tenants(session)) == 4


def test_two_servers_take_none_of_them_twice(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        store(session, make_job(session, "ftjob-1"), 4, 8)
        job = session.get_one(TuningJob, "ftjob-1")
        job.state, job.ended_at = JobState.CANCELLED, utc_now()

    def take() -> Sequence[StoredCheckpoint]:
        with database.platform_transaction() as second:
            return stored_checkpoints.take_needless(second)

    with ThreadPoolExecutor(1) as threads:
        with database.platform_transaction() as first:
            assert len(stored_checkpoints.take_needless(first)) == 2
            other = threads.submit(take)
            wait([other], timeout=0.5)
        assert other.result() == []


def test_the_removal_of_a_damaged_one_is_an_event_with_a_number_of_its_own(
    database: Database, acme: Tenant
) -> None:
    """While another change of the job adds one: lists of events go on after a number."""
    with database.transaction(acme.id) as session:
        job_id = make_job(session, "ftjob-1")
        store(session, job_id, 4)
        (stored,) = session.scalars(select(StoredCheckpoint.id))

    def remove() -> None:
        with database.transaction(acme.id) as session:
            stored_checkpoints.remove_damaged(session, stored)

    with ThreadPoolExecutor(1) as threads:
        with database.transaction(acme.id) as session:
            service.get_job(session, job_id, is_locked=True)
            service.add_events(session, job_id, [Happened("The job was paused.")])
            removing = threads.submit(remove)
            wait_until_one_is_blocked(session)
        removing.result()
    with database.transaction(acme.id) as session:
        assert sorted(session.scalars(select(TuningEvent.number))) == [1, 2]
        assert session.scalars(select(StoredCheckpoint)).all() == []


def test_they_are_deleted_with_their_job(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        job_id = make_job(session, "ftjob-1")
        store(session, job_id, 4)
        job = session.get_one(TuningJob, job_id)
        job.state, job.ended_at = JobState.CANCELLED, utc_now()
        session.flush()
        assert service.remove_ended(session, "bot") == 1
        assert session.scalars(select(StoredCheckpoint)).all() == []
