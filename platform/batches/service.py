"""Creates batches, keeps the results of their lines, and ends them.

A result is added once, in the transaction that charges the line: `add_result` locks the batch, and
refuses a second result of a line and any result of a batch whose results are being written.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, cast

from sqlalchemy import Executable, bindparam, delete, func, select, tuple_

from ..base import JsonObject, utc_now
from ..errors import BatchNotFound, InvalidValue, QuotaExceeded
from ..keys.principal import Principal
from ..quotas.repository import lock_tenant
from ..sessions import PlatformSession, TenantRows, TenantSession
from ..upserts import insert_into, primary_key
from ..webhooks.event_types import EventType
from ..webhooks.outbox import announce
from . import files
from .file_models import FilePurpose, StoredFile
from .models import Batch, BatchResult
from .states import OPEN_STATES, BatchState, check_transition

COMPLETION_WINDOW = timedelta(hours=24)
MAX_OPEN = 100
"""Batches of one tenant that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a caller asks for."""

    endpoint: str
    input_file_id: str
    key_id: str
    address: str | None
    labels: JsonObject | None


class OpenBatch(NamedTuple):
    """A batch that has not ended, and whose it is."""

    tenant_id: str
    batch_id: str


class Counts(NamedTuple):
    """How many lines have results."""

    completed: int
    failed: int


class Result(NamedTuple):
    """The result of a line."""

    batch_id: str
    number: int
    is_success: bool
    content: bytes
    """The line of the output or error file."""


# --- what callers do ------------------------------------------------------------------------------


def create(session: TenantSession, new: NewBatch, viewer: Principal | None) -> Batch:
    """Add a batch, whose file is checked later.

    Raises FileNotFound, InvalidValue for a file of another purpose, or QuotaExceeded.
    """
    lock_tenant(session)
    file = files.get_file(session, new.input_file_id, viewer=viewer)
    if file.purpose is not FilePurpose.BATCH:
        message = f"input_file_id: the purpose of this file is `{file.purpose}`, not `batch`"
        raise InvalidValue(message, param="input_file_id")
    num_open = session.scalar(select(func.count(Batch.id)).where(Batch.state.in_(OPEN_STATES)))
    if num_open is not None and num_open >= MAX_OPEN:
        raise QuotaExceeded("batches that have not ended", limit=MAX_OPEN, used=num_open)
    now = utc_now()
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        key_id=new.key_id,
        address=new.address,
        endpoint=new.endpoint,
        input_file_id=file.id,
        state=BatchState.VALIDATING,
        labels=new.labels,
        num_lines=0,
        num_completed=0,
        num_failed=0,
        created_at=now,
        expires_at=now + COMPLETION_WINDOW,
    )
    session.add(batch)
    session.flush()
    return batch


def get_batch(session: TenantSession, batch_id: str, *, viewer: Principal | None = None) -> Batch:
    """The tenant's batch. Raises BatchNotFound, also if the viewer may not see it."""
    return _known(session, batch_id, viewer, is_locked=False)


def list_batches(
    session: TenantSession, *, viewer: Principal, after: str | None, limit: int
) -> Sequence[Batch]:
    """At most `limit` batches after the batch `after`, the newest first."""
    query = select(Batch).order_by(Batch.created_at.desc(), Batch.id.desc()).limit(limit)
    if viewer.adapters is not None:
        query = query.where(Batch.key_id == viewer.key_id)
    if after is not None:
        last = select(Batch.created_at, Batch.id).where(Batch.id == after)
        query = query.where(tuple_(Batch.created_at, Batch.id) < last.scalar_subquery())
    return session.scalars(query).all()


def cancel(
    session: TenantSession, batch_id: str, *, viewer: Principal | None
) -> tuple[Batch, bool]:
    """Ask for the cancellation; returns the batch, and whether it was asked for now.

    Raises BatchNotFound, or InvalidTransition if no more lines are answered.
    """
    batch = _known(session, batch_id, viewer, is_locked=True)
    if batch.state in {BatchState.CANCELLING, BatchState.CANCELLED}:
        return batch, False
    _go(batch, BatchState.CANCELLING)
    batch.cancelling_at = utc_now()
    return batch, True


def cancel_all(session: TenantSession) -> None:
    """Ask for the cancellation of every batch that still answers lines."""
    answering = (BatchState.VALIDATING, BatchState.IN_PROGRESS)
    query = select(Batch).where(Batch.state.in_(answering)).with_for_update()
    for batch in session.scalars(query).all():
        _go(batch, BatchState.CANCELLING)
        batch.cancelling_at = utc_now()


def has_open(session: TenantSession) -> bool:
    """Whether a batch has not ended."""
    query = select(Batch.id).where(Batch.state.in_(OPEN_STATES)).limit(1)
    return session.scalars(query).first() is not None


def count_results(session: TenantSession, batch: Batch) -> Counts:
    """The lines with results, of a batch in any state."""
    if batch.state not in OPEN_STATES:
        return Counts(batch.num_completed, batch.num_failed)
    query = (
        select(BatchResult.is_success, func.count(BatchResult.number))
        .where(BatchResult.batch_id == batch.id)
        .group_by(BatchResult.is_success)
    )
    counts = {row[0]: row[1] for row in session.execute(query)}
    return Counts(counts.get(True, 0), counts.get(False, 0))


# --- what the server that has the lease does ------------------------------------------------------


def list_open_of_all_tenants(session: PlatformSession) -> Sequence[OpenBatch]:
    """The batches that have not ended, the oldest first."""
    query = select(Batch.tenant_id, Batch.id).where(Batch.state.in_(OPEN_STATES))
    return [OpenBatch(*row) for row in session.execute(query.order_by(Batch.created_at, Batch.id))]


def begin(session: TenantSession, batch_id: str, num_lines: int) -> Batch:
    """Its file is valid: its lines are answered from now on, unless it was cancelled."""
    batch = _known(session, batch_id, None, is_locked=True)
    if batch.num_lines == 0:
        batch.num_lines = num_lines
    if batch.state is BatchState.VALIDATING:
        _go(batch, BatchState.IN_PROGRESS)
        batch.in_progress_at = utc_now()
    return batch


def fail(session: TenantSession, batch_id: str, errors: list[JsonObject]) -> Batch:
    """Its file is invalid; a batch that was cancelled meanwhile is cancelled."""
    batch = _known(session, batch_id, None, is_locked=True)
    is_cancelled = batch.state is BatchState.CANCELLING
    _go(batch, BatchState.CANCELLED if is_cancelled else BatchState.FAILED)
    batch.errors = errors
    batch.ended_at = utc_now()
    _announce_end(session, batch)
    return batch


def close(session: TenantSession, batch_id: str) -> Batch:
    """Add no more results to it. May be repeated."""
    batch = _known(session, batch_id, None, is_locked=True)
    if batch.state is BatchState.IN_PROGRESS:
        _go(batch, BatchState.FINALIZING)
    batch.finalizing_at = batch.finalizing_at or utc_now()
    return batch


def finish(
    session: TenantSession,
    batch_id: str,
    *,
    counts: Counts,
    output: StoredFile | None,
    errors: StoredFile | None,
) -> Batch:
    """End a closed batch: its results are these files, whose bytes are in the store.

    The counts are those of the results; the files may tell of lines without any.
    """
    batch = _known(session, batch_id, None, is_locked=True)
    if batch.state is BatchState.CANCELLING:
        _go(batch, BatchState.CANCELLED)
    elif sum(counts) < batch.num_lines:
        _go(batch, BatchState.EXPIRED)
    else:
        _go(batch, BatchState.COMPLETED)
    batch.num_completed, batch.num_failed = counts
    batch.ended_at = utc_now()
    for file in (output, errors):
        if file is not None:
            session.add(file)
    batch.output_file_id = output.id if output else None
    batch.error_file_id = errors.id if errors else None
    session.execute_pinned(_REMOVE_RESULTS, {"batch_id": batch_id})
    _announce_end(session, batch)
    return batch


def list_answered(session: TenantSession, batch_id: str) -> set[int]:
    """The numbers of the lines that have results."""
    query = select(BatchResult.number).where(BatchResult.batch_id == batch_id)
    return set(session.scalars(query))


def list_results(
    session: TenantSession, batch_id: str, *, after: int, limit: int
) -> Sequence[BatchResult]:
    """At most `limit` results, of lines after this one, in the order of the lines."""
    query = select(BatchResult).where(BatchResult.batch_id == batch_id, BatchResult.number > after)
    return session.scalars(query.order_by(BatchResult.number).limit(limit)).all()


def add_result(session: TenantRows, result: Result) -> bool:
    """Add the result of a line; False if it has one, or the batch takes no more."""
    found = session.execute_pinned(_HOLD_BATCH, {"batch_id": result.batch_id}).first()
    if found is None or found.finalizing_at is not None or found.ended_at is not None:
        return False
    row: dict[str, Any] = result._asdict()
    return session.execute_pinned(_add_result(session.dialect), row).first() is not None


@cache
def _add_result(dialect: str) -> Executable:
    statement = insert_into(BatchResult, dialect)
    statement = statement.on_conflict_do_nothing(index_elements=primary_key(BatchResult))
    return cast(Executable, statement.returning(BatchResult.__table__.c.number))


_BATCHES, _RESULTS = Batch.__table__, BatchResult.__table__
_HOLD_BATCH = (
    select(_BATCHES.c.finalizing_at, _BATCHES.c.ended_at)
    .where(_BATCHES.c.tenant_id == bindparam("tenant_id"), _BATCHES.c.id == bindparam("batch_id"))
    .with_for_update(read=True)
)
"""Locked against being closed or ended until the result is committed."""
_REMOVE_RESULTS = delete(_RESULTS).where(  # type: ignore[arg-type]
    _RESULTS.c.tenant_id == bindparam("tenant_id"), _RESULTS.c.batch_id == bindparam("batch_id")
)


# --- the retention of batches ---------------------------------------------------------------------


def purge(session: PlatformSession, before: datetime, limit: int = 500) -> int:
    """Delete batches that ended before this; returns how many."""
    query = select(Batch).where(Batch.ended_at < before).order_by(Batch.ended_at).limit(limit)
    ended = session.scalars(query).all()
    for batch in ended:
        session.delete(batch)
    return len(ended)


def _known(
    session: TenantSession, batch_id: str, viewer: Principal | None, *, is_locked: bool
) -> Batch:
    query = select(Batch).where(Batch.id == batch_id)
    if viewer is not None and viewer.adapters is not None:
        query = query.where(Batch.key_id == viewer.key_id)
    if is_locked:
        query = query.with_for_update()
    found = session.scalars(query).one_or_none()
    if found is None:
        raise BatchNotFound(f"There is no batch `{batch_id}`.")
    return found


def _go(batch: Batch, target: BatchState) -> None:
    check_transition(batch.state, target)
    batch.state = target


def _announce_end(session: TenantSession, batch: Batch) -> None:
    data = {
        "batch": batch.id,
        "state": batch.state,
        "lines": batch.num_lines,
        "completed": batch.num_completed,
        "failed": batch.num_failed,
        "output_file": batch.output_file_id,
        "error_file": batch.error_file_id,
    }
    announce(session, session.tenant_id, EventType.BATCH_ENDED, data)
