"""Upkeep jobs with several servers: each is run by one, or by another if that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from loraplex.api.control_plane import jobs as jobs_module
from loraplex.api.control_plane import leases as leases_module
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.jobs import RETRY, Job, Jobs
from loraplex.api.control_plane.leases import LeaseLost, Leases
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.jobs.models import JobLease
from loraplex.platform.jobs.service import LEASE

DAY = timedelta(days=1)


@pytest.fixture
def servers(database: Database) -> Iterator[list[Jobs]]:
    """Three servers on one database."""
    planes = [ControlPlane(database, b"s" * 32) for _ in range(3)]
    yield [Jobs(Leases(plane, f"server-{n}"), []) for n, plane in enumerate(planes)]
    for plane in planes:
        plane.close()


def let_time_pass(database: Database, passed: timedelta) -> None:
    with database.platform_transaction() as session:
        row = session.get_one(JobLease, "job")
        row.expires_at = row.expires_at and row.expires_at - passed
        row.finished_at = row.finished_at and row.finished_at - passed


def expiry(database: Database) -> datetime:
    with database.platform_transaction(read_only=True) as session:
        expires_at = session.get_one(JobLease, "job").expires_at
    assert expires_at is not None
    return expires_at


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_one_of_the_servers_does_the_job_when_it_is_due(
    database: Database, servers: list[Jobs]
) -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(1)
        await asyncio.sleep(0.05)

    job = Job(name="job", every=DAY, run=work)

    async def round_() -> list[bool]:
        return await asyncio.gather(*(server.run_if_due(job) for server in servers))

    assert sorted(asyncio.run(round_())) == [False, False, True]
    assert sorted(asyncio.run(round_())) == [False, False, False]
    let_time_pass(database, DAY)
    assert sorted(asyncio.run(round_())) == [False, False, True]
    assert len(done) == 2


def test_a_job_that_fails_is_tried_again_later_by_any(
    database: Database, servers: list[Jobs]
) -> None:
    async def fail() -> None:
        raise OSError("disk")

    async def work() -> None:
        pass

    failing, working = (Job(name="job", every=DAY, run=run) for run in (fail, work))
    with pytest.raises(OSError, match="disk"):
        asyncio.run(servers[0].run_if_due(failing))
    assert not asyncio.run(servers[1].run_if_due(working))
    let_time_pass(database, RETRY)
    assert asyncio.run(servers[1].run_if_due(working))


def test_a_job_that_is_cut_off_by_a_stop_is_tried_again_later_by_any(
    database: Database, servers: list[Jobs]
) -> None:
    has_begun = asyncio.Event()

    async def hang() -> None:
        has_begun.set()
        await asyncio.sleep(60)

    async def stop_midway() -> None:
        running = asyncio.create_task(servers[0].run_if_due(Job(name="job", every=DAY, run=hang)))
        await has_begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def work() -> None:
        pass

    asyncio.run(stop_midway())
    working = Job(name="job", every=DAY, run=work)
    assert not asyncio.run(servers[0].run_if_due(working))
    let_time_pass(database, RETRY)
    assert asyncio.run(servers[1].run_if_due(working))


def test_who_lost_the_lease_stops(
    database: Database, servers: list[Jobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "RENEWAL_SECONDS", 0.05)
    has_begun = asyncio.Event()
    ends: list[str] = []

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def run() -> None:
        slow = asyncio.create_task(servers[0].run_if_due(Job(name="job", every=DAY, run=work)))
        await has_begun.wait()
        first = expiry(database)
        await until(lambda: expiry(database) > first)
        with database.platform_transaction() as session:
            assert session.get_one(JobLease, "job").server_id == "server-0"
            session.get_one(JobLease, "job").server_id = "server-1"  # as if it had expired
        with pytest.raises(LeaseLost):
            await slow

    asyncio.run(run())
    assert ends == ["cancelled"]


def test_a_lease_is_renewed_while_the_work_goes_on(
    database: Database, servers: list[Jobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "RENEWAL_SECONDS", 0.05)
    held = asyncio.Event()

    async def work() -> None:
        let_time_pass(database, LEASE - timedelta(seconds=1))
        passed = expiry(database)
        await until(lambda: expiry(database) > passed + LEASE / 2)
        let_time_pass(database, LEASE - timedelta(seconds=1))
        assert not await servers[1].run_if_due(Job(name="job", every=DAY, run=work))
        held.set()

    assert asyncio.run(servers[0].run_if_due(Job(name="job", every=DAY, run=work)))
    assert held.is_set()


def test_work_goes_on_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "RENEWAL_SECONDS", 0.001)
    renewals: list[object] = []

    class Away:
        async def write_all_tenants(self, change: object) -> set[str]:
            renewals.append(change)
            raise DatabaseUnavailable

    async def work() -> str:
        await until(lambda: len(renewals) > 2)
        return "done"

    with capture_logs() as logged:
        leases = Leases(cast(ControlPlane, Away()), "server")
        assert asyncio.run(leases.keep("job", work())) == "done"
    noted = {"event": "lease_not_renewed", "log_level": "warning", "lease": "job"}
    assert logged[0] == noted | {"error": str(DatabaseUnavailable())}


def test_who_lost_the_lease_has_stopped_when_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "RENEWAL_SECONDS", 0.001)
    ends: list[str] = []

    class Taken:
        async def write_all_tenants(self, change: object) -> set[str]:
            return set()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("stopped")

    async def run() -> None:
        with pytest.raises(LeaseLost, match="job"):
            await Leases(cast(ControlPlane, Taken()), "server").keep("job", work())
        assert ends == ["stopped"]

    asyncio.run(run())


def test_what_is_forgotten_leaves_no_lease(database: Database, servers: list[Jobs]) -> None:
    async def run() -> None:
        leases = servers[0]._leases
        assert await leases.claim("job")
        await leases.forget("job")

    asyncio.run(run())
    with database.platform_transaction(read_only=True) as session:
        assert session.get(JobLease, "job") is None


@pytest.mark.parametrize(
    ("failure", "event", "level"),
    [
        (None, "job_done", "info"),
        (DatabaseUnavailable(), "job_delayed", "warning"),
        (LeaseLost("job"), "job_delayed", "warning"),
        (ValueError("planted"), "job_failed", "error"),
    ],
)
def test_a_server_looks_for_due_jobs_until_it_stops_and_notes_what_became_of_them(
    failure: Exception | None, event: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "POLL_SECONDS", 0.001)
    num_looks = 0

    class OnceDue:
        async def claim(self, name: str, **_: object) -> bool:
            nonlocal num_looks
            num_looks += 1
            return num_looks == 1

        async def keep(self, name: str, work: Any) -> None:
            await work

        async def finish(self, name: str) -> None: ...

        async def postpone(self, name: str, pause: timedelta) -> None: ...

    async def work() -> None:
        if failure is not None:
            raise failure

    async def run() -> None:
        job = Job(name="job", every=DAY, run=work)
        jobs = Jobs(cast(Leases, OnceDue()), [job])
        jobs.start()
        await until(lambda: num_looks > 2)
        await jobs.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with capture_logs() as logged:
        asyncio.run(run())
    assert [(each["event"], each["log_level"], each["job"]) for each in logged] == [
        (event, level, "job")
    ]
