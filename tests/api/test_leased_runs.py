"""Runs under leases: one server does the work, and what ends a run decides when another may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.leased_runs import RETRY, LeasedRuns
from loraplex.api.control_plane.leases import LeaseLost, Leases
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.jobs.models import JobLease

Run = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture
def servers(database: Database) -> Iterator[list[LeasedRuns[str]]]:
    """Two servers on one database."""
    planes = [ControlPlane(database, b"s" * 32) for _ in range(2)]
    yield [LeasedRuns(Leases(plane, f"{n}"), "work", str.upper) for n, plane in enumerate(planes)]
    for plane in planes:
        plane.close()


def lease(database: Database) -> JobLease | None:
    with database.platform_transaction(read_only=True) as session:
        return session.get(JobLease, "A")


async def idle() -> None:
    await asyncio.sleep(60)


async def over(runs: LeasedRuns[str]) -> None:
    while list(runs):
        await asyncio.sleep(0.005)


def failing(exc: Exception) -> Run:
    async def run() -> None:
        raise exc

    return run


def test_only_the_server_with_the_lease_runs(servers: list[LeasedRuns[str]]) -> None:
    first, second = servers

    async def scenario() -> None:
        await first.begin("a", idle)
        await second.begin("a", idle)
        assert (list(first), len(first)) == (["a"], 1)
        assert (list(second), len(second)) == ([], 0)
        await first.stop()

    asyncio.run(scenario())


def test_a_run_that_ends_leaves_no_lease(
    database: Database, servers: list[LeasedRuns[str]]
) -> None:
    async def scenario() -> None:
        await servers[0].begin("a", lambda: asyncio.sleep(0))
        assert lease(database) is not None
        await over(servers[0])

    asyncio.run(scenario())
    assert lease(database) is None


def test_what_a_stopped_server_ran_may_be_taken_at_once(servers: list[LeasedRuns[str]]) -> None:
    first, second = servers

    async def scenario() -> None:
        await first.begin("a", idle)
        await asyncio.sleep(0)
        await first.stop()
        assert list(first) == []
        await second.begin("a", idle)
        assert list(second) == ["a"]
        await second.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("exc", "event", "level"),
    [
        (DatabaseUnavailable(), "work_delayed", "warning"),
        (OSError("no space left"), "work_delayed", "warning"),
        (RuntimeError("a defect"), "work_failed_unexpectedly", "error"),
    ],
)
def test_a_failure_is_told_and_nobody_tries_again_before_the_pause(
    database: Database, servers: list[LeasedRuns[str]], exc: Exception, event: str, level: str
) -> None:
    async def scenario() -> None:
        await servers[0].begin("a", failing(exc))
        await over(servers[0])
        await servers[1].begin("a", idle)
        assert list(servers[1]) == []

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [(entry["event"], entry["log_level"], entry["lease"]) for entry in logs] == [
        (event, level, "A")
    ]
    row = lease(database)
    assert row is not None
    assert row.server_id is None
    assert row.expires_at is not None
    rest = row.expires_at - datetime.now(UTC)
    assert timedelta(0) < rest <= RETRY


def test_a_run_is_not_over_before_its_lease_is_released(
    servers: list[LeasedRuns[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_releasing, may_release = asyncio.Event(), asyncio.Event()
    postpone = Leases.postpone

    async def late(leases: Leases, name: str, pause: timedelta) -> None:
        is_releasing.set()
        await may_release.wait()
        await postpone(leases, name, pause)

    async def scenario() -> None:
        await servers[0].begin("a", failing(OSError("no space left")))
        await is_releasing.wait()
        assert list(servers[0]) == ["a"]
        may_release.set()
        await over(servers[0])
        await servers[0].begin("a", idle)
        assert list(servers[0]) == [], "the pause holds for its own server, too"

    monkeypatch.setattr(Leases, "postpone", late)
    asyncio.run(scenario())


def test_a_run_that_is_stopped_before_it_begins_is_over(servers: list[LeasedRuns[str]]) -> None:
    async def scenario() -> None:
        await servers[0].begin("a", idle)
        await servers[0].stop()
        assert list(servers[0]) == []

    asyncio.run(scenario())


def test_a_lease_that_another_server_has_taken_stays_its_own(
    database: Database, servers: list[LeasedRuns[str]]
) -> None:
    async def taken() -> None:
        with database.platform_transaction() as session:
            session.get_one(JobLease, "A").server_id = "1"
        raise LeaseLost("A")

    async def scenario() -> None:
        await servers[0].begin("a", taken)
        await over(servers[0])

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [entry["event"] for entry in logs] == ["work_taken_over"]
    row = lease(database)
    assert row is not None
    assert row.server_id == "1"
