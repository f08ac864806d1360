"""The checkpoints of jobs whose bytes are in the object store.

An object is written before its row, and removed after it. So a row names an object that is whole,
unless the store damages it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from sqlalchemy import Select, func, select

from ..errors import TuningJobNotFound
from ..quotas import service as quotas
from ..sessions import PlatformSession, TenantSession
from .models import StoredCheckpoint, TuningJob
from .service import Happened, add_events, get_job
from .states import OPEN_STATES

NUM_KEPT = 2
"""Of one job on one runtime: if the newest one is damaged, the one before it serves."""
NUM_AT_ONCE = 100


def new_checkpoint_id() -> str:
    """The id of a stored checkpoint."""
    return f"ftckpt-{uuid.uuid4().hex}"


def is_stored(session: TenantSession, job_id: str, sha256: str, *, runtime_id: str) -> bool:
    """Whether the job has a checkpoint of this content."""
    query = _of_job(job_id, runtime_id).where(StoredCheckpoint.sha256 == sha256)
    return session.scalars(query).first() is not None


def check_room(session: TenantSession, job_id: str, size_bytes: int, *, runtime_id: str) -> None:
    """Check that one more of this size fits next to the tenant's adapters, uploads and checkpoints,
    but for those that it replaces. Checkpoints never keep an adapter out. Raises QuotaExceeded.
    """
    all_sizes = select(func.coalesce(func.sum(StoredCheckpoint.size_bytes), 0))
    replaced = session.scalars(_of_job(job_id, runtime_id).offset(NUM_KEPT - 1))
    used = int(session.scalar(all_sizes) or 0) - sum(each.size_bytes for each in replaced)
    quotas.check_room_for_upload(session, used + size_bytes)


def add(
    session: TenantSession, checkpoint: StoredCheckpoint, *, server_id: str
) -> Sequence[StoredCheckpoint]:
    """Keep a checkpoint whose object is in the store. Returns those whose objects are to be
    removed: older ones of the same runtime, or this one if the job is gone, has ended or is another
    server's."""
    try:
        job = get_job(session, checkpoint.job_id, is_locked=True)
    except TuningJobNotFound:
        return [checkpoint]
    if job.state not in OPEN_STATES or job.server_id != server_id:
        return [checkpoint]
    session.add(checkpoint)
    session.flush()
    old = session.scalars(_of_job(job.id, checkpoint.runtime_id).offset(NUM_KEPT)).all()
    for each in old:
        session.delete(each)
    return old


def list_newest(
    session: TenantSession, job_id: str, *, runtime_id: str
) -> Sequence[StoredCheckpoint]:
    """Those of the base as this runtime serves it, the newest first."""
    return session.scalars(_of_job(job_id, runtime_id)).all()


def remove_damaged(session: TenantSession, checkpoint_id: str) -> None:
    """Remove a checkpoint whose object is not what was stored, with an event of its job."""
    query = select(StoredCheckpoint).where(StoredCheckpoint.id == checkpoint_id)
    found = session.scalars(query).one_or_none()
    if found is not None:
        get_job(session, found.job_id, is_locked=True)  # for the event's number
        message = f"The stored checkpoint of step {found.step} is damaged and was removed."
        add_events(session, found.job_id, [Happened(message, "warn")])
        session.delete(found)


def has_needless(session: PlatformSession) -> bool:
    """Whether a job that has ended has a checkpoint."""
    return session.scalars(_needless(limit=1)).first() is not None


def take_needless(session: PlatformSession) -> Sequence[StoredCheckpoint]:
    """Remove some checkpoints of jobs that have ended, but for those that another server is
    removing; the caller then removes their objects."""
    query = _needless(limit=NUM_AT_ONCE).with_for_update(of=StoredCheckpoint, skip_locked=True)
    found = session.scalars(query).all()
    for each in found:
        session.delete(each)
    return found


def list_of_all_tenants(session: PlatformSession) -> Sequence[StoredCheckpoint]:
    """Every checkpoint that has bytes in the store."""
    return session.scalars(select(StoredCheckpoint)).all()


def exists(session: TenantSession, checkpoint_id: str) -> bool:
    """The tenant has this checkpoint."""
    query = select(StoredCheckpoint.id).where(StoredCheckpoint.id == checkpoint_id)
    return session.scalars(query).first() is not None


def _needless(*, limit: int) -> Select[StoredCheckpoint]:
    return (
        select(StoredCheckpoint)
        .join(TuningJob, TuningJob.id == StoredCheckpoint.job_id)
        .where(TuningJob.ended_at.is_not(None))
        .limit(limit)
    )


def _of_job(job_id: str, runtime_id: str) -> Select[StoredCheckpoint]:
    of_job = select(StoredCheckpoint).where(
        StoredCheckpoint.job_id == job_id, StoredCheckpoint.runtime_id == runtime_id
    )
    return of_job.order_by(StoredCheckpoint.step.desc(), StoredCheckpoint.created_at.desc())
