"""Job leases: one server at a time, by the shared clock, with takeover from dead servers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from loraplex.platform.database import Database
from loraplex.platform.jobs import service as jobs
from loraplex.platform.jobs.models import JobLease

DAY = timedelta(days=1)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def claim(
    database: Database, server: str, name: str = "work", every: timedelta | None = None
) -> bool:
    with database.platform_transaction() as session:
        return jobs.claim(session, name, server, every=every)


def let_time_pass(database: Database, passed: timedelta, name: str = "work") -> None:
    """As if everything about the lease had happened so much earlier."""
    with database.platform_transaction() as session:
        row = session.get_one(JobLease, name)
        row.expires_at = row.expires_at and row.expires_at - passed
        row.finished_at = row.finished_at and row.finished_at - passed


def test_one_server_has_the_lease_and_keeps_it(database: Database) -> None:
    assert claim(database, "a")
    assert not claim(database, "b")
    assert claim(database, "a")  # it runs at most once: its earlier self is gone
    let_time_pass(database, jobs.LEASE - timedelta(seconds=5))
    with database.platform_transaction() as session:
        assert jobs.renew(session, ["work", "other"], "a") == {"work"}
    let_time_pass(database, jobs.LEASE - timedelta(seconds=5))
    assert not claim(database, "b")


def test_a_lease_that_expired_is_taken_over(database: Database) -> None:
    assert claim(database, "a")
    let_time_pass(database, jobs.LEASE)
    assert claim(database, "b")
    with database.platform_transaction() as session:
        assert jobs.renew(session, ["work"], "a") == set()
        jobs.finish(session, "work", "a")  # has no say any more
        jobs.postpone(session, "work", "a", -DAY)
    assert not claim(database, "a")


def test_a_lease_and_a_pause_end_at_their_moments(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_at(moment: datetime, server: str) -> bool:
        monkeypatch.setattr(jobs, "shared_now", lambda _: moment)
        return claim(database, server, every=DAY)

    instant = timedelta(microseconds=1)
    assert claim_at(NOON, "a")
    assert not claim_at(NOON + jobs.LEASE - instant, "b")
    assert claim_at(NOON + jobs.LEASE, "b")
    with database.platform_transaction() as session:
        jobs.finish(session, "work", "b")
    finished_at = NOON + jobs.LEASE
    assert not claim_at(finished_at, "a")
    assert not claim_at(finished_at + DAY - instant, "a")
    assert claim_at(finished_at + DAY, "a")


def test_servers_go_by_the_clock_of_a_database_that_they_share_from_afar(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "utc_now", lambda: NOON)
    with database.platform_transaction() as session:
        is_near = session.get_bind().dialect.name == "sqlite"
        assert (jobs.shared_now(session) == NOON) == is_near


def test_a_renewal_concerns_the_named_leases_alone(database: Database) -> None:
    for name in ("work", "stuck"):
        assert claim(database, "a", name)
        let_time_pass(database, jobs.LEASE - timedelta(seconds=5), name)
    with database.platform_transaction() as session:
        assert jobs.renew(session, ["work"], "a") == {"work"}
    let_time_pass(database, timedelta(seconds=5), "stuck")
    assert claim(database, "b", "stuck")


def test_a_lease_is_free_as_soon_as_its_work_is_done(database: Database) -> None:
    assert claim(database, "a")
    with database.platform_transaction() as session:
        jobs.finish(session, "work", "a")
    assert claim(database, "b")


def test_finished_work_is_due_again_after_its_time(database: Database) -> None:
    assert claim(database, "a", every=DAY)
    with database.platform_transaction() as session:
        jobs.finish(session, "work", "a")
    assert not claim(database, "a", every=DAY)
    assert not claim(database, "b", every=DAY)
    let_time_pass(database, DAY)
    assert claim(database, "b", every=DAY)


def test_a_clock_that_was_set_back_does_not_put_work_off(database: Database) -> None:
    assert claim(database, "a", every=DAY)
    with database.platform_transaction() as session:
        jobs.finish(session, "work", "a")
    let_time_pass(database, -300 * DAY)
    assert claim(database, "b", every=DAY)


def test_failed_work_is_tried_again_after_a_pause(database: Database) -> None:
    assert claim(database, "a", every=DAY)
    with database.platform_transaction() as session:
        jobs.postpone(session, "work", "a", timedelta(minutes=10))
    assert not claim(database, "a", every=DAY)
    assert not claim(database, "b", every=DAY)
    let_time_pass(database, timedelta(minutes=10))
    assert claim(database, "b", every=DAY)


def test_what_is_done_once_leaves_nothing(database: Database) -> None:
    for name in ("deletion:1", "deletion:2", "daily"):
        assert claim(database, "a", name)
    with database.platform_transaction() as session:
        jobs.forget(session, "deletion:1", "b")
        assert session.get(JobLease, "deletion:1") is not None
        jobs.forget(session, "deletion:1", "a")
    with database.platform_transaction() as session:
        assert session.get(JobLease, "deletion:1") is None
        assert jobs.purge(session) == 0
    let_time_pass(database, DAY, "deletion:2")
    with database.platform_transaction() as session:
        assert jobs.purge(session) == 0
    for name in ("deletion:2", "daily"):
        let_time_pass(database, DAY, name)
    with database.platform_transaction() as session:
        assert jobs.purge(session) == 1
        assert session.get(JobLease, "daily") is not None


@pytest.mark.parametrize("round_", range(3))
def test_of_many_that_come_first_at_once_one_gets_it(database: Database, round_: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda number: claim(database, str(number)), range(8)))
    assert sum(taken) == 1
