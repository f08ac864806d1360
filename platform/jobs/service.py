"""Leases on jobs that one server at a time may run, by a clock that the servers share.

A lease is renewed while the job runs. If its server dies, the lease expires and another server
takes over. The server itself, of which only one process runs, takes its own lease again at once.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select

from ..base import utc_now
from ..locked_rows import lock_or_add
from ..sessions import PlatformSession
from .models import JobLease

LEASE = timedelta(seconds=60)
ONCE = ":"
"""In the name of a lease on work that is done once, such as `deletion:` and a version's id."""


def shared_now(session: PlatformSession) -> datetime:
    """The present moment by the clock that all servers of this database share."""
    if session.get_bind().dialect.name == "sqlite":
        return utc_now()  # they share the machine
    # Not now(): that is when the transaction began, before it waited for locks.
    moment: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return moment


def claim(
    session: PlatformSession, name: str, server_id: str, *, every: timedelta | None = None
) -> bool:
    """Take the lease; False if another server has it, or if the job is not due.

    `every`: the time after its last completion at which the job is due.
    """
    row = lock_or_add(session, JobLease(name=name))
    now = shared_now(session)
    is_free = row.expires_at is None or row.expires_at <= now or row.server_id == server_id
    if not is_free or not _is_due(row, now, every):
        return False
    row.server_id, row.expires_at = server_id, now + LEASE
    return True


def renew(session: PlatformSession, names: Collection[str], server_id: str) -> set[str]:
    """Renew the leases; returns the names of those that the server still has."""
    held = select(JobLease).where(JobLease.name.in_(names), JobLease.server_id == server_id)
    rows = session.scalars(held.order_by(JobLease.name).with_for_update()).all()
    for row in rows:
        row.expires_at = shared_now(session) + LEASE
    return {row.name for row in rows}


def finish(session: PlatformSession, name: str, server_id: str) -> None:
    """The work is done, until it is due again."""
    row = _held(session, name, server_id)
    if row is not None:
        row.server_id, row.expires_at, row.finished_at = None, None, shared_now(session)


def postpone(session: PlatformSession, name: str, server_id: str, pause: timedelta) -> None:
    """The job failed: any server may try again after the pause."""
    row = _held(session, name, server_id)
    if row is not None:
        row.server_id, row.expires_at = None, shared_now(session) + pause


def forget(session: PlatformSession, name: str, server_id: str) -> None:
    """The work is done once for all."""
    row = _held(session, name, server_id)
    if row is not None:
        session.delete(row)


def purge(session: PlatformSession) -> int:
    """Delete the leases of one-time jobs whose servers died after finishing; returns how many."""
    long_ago = shared_now(session) - timedelta(days=1)
    forgotten = session.execute(
        delete(JobLease)
        .where(JobLease.name.contains(ONCE), JobLease.expires_at < long_ago)
        .returning(JobLease.name)
    )
    return len(forgotten.all())


def _held(session: PlatformSession, name: str, server_id: str) -> JobLease | None:
    row = session.get(JobLease, name, with_for_update=True)
    return row if row is not None and row.server_id == server_id else None


def _is_due(row: JobLease, now: datetime, every: timedelta | None) -> bool:
    if every is None or row.finished_at is None:
        return True
    # A clock that was set back must not delay the job until it has caught up.
    return not row.finished_at <= now < row.finished_at + every
