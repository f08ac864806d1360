"""Creates fine-tuning jobs, keeps their progress, and ends them.

The tokens of a step count once, however often it is repeated: `record` raises the job's total to
that of the highest step, in the transaction that adds the difference to the tenant's usage.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, func, select, tuple_

from ..adapters.models import Adapter, AdapterVersion
from ..base import JsonObject, utc_now
from ..batches import files
from ..batches.file_models import FilePurpose, StoredFile
from ..budgets import training as budgets
from ..errors import FileInUse, InvalidTransition, InvalidValue, QuotaExceeded, TuningJobNotFound
from ..keys.principal import Principal
from ..names import check_adapter_name
from ..prices.price import amount_of_training
from ..quotas import service as quotas
from ..quotas.holder import Holder, payers_of, possessive
from ..quotas.repository import lock_tenant
from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from ..usage import service as usage
from ..usage.service import Training
from ..webhooks.event_types import EventType
from ..webhooks.outbox import announce
from .models import StoredCheckpoint, TuningCheckpoint, TuningEvent, TuningJob
from .states import OPEN_STATES, JobState, PauseReason, check_transition

MAX_OPEN = 20
"""Jobs of one tenant that have not ended."""
MAX_EVENTS = 1000
"""Of one job; the oldest are removed."""
MAX_CHECKPOINTS = 100
"""Likewise."""

Level = Literal["info", "warn", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a caller asks for."""

    adapter_name: str
    training_file_id: str
    validation_file_id: str | None
    recipe: JsonObject
    labels: JsonObject | None
    created_by: str
    token_price: int = 0
    """Of a million trained tokens, in 1e-9 of the currency's unit."""


class OpenJob(NamedTuple):
    """A job that is to be trained, and whose it is."""

    tenant_id: str
    tenant_slug: str
    job_id: str
    server_id: str | None
    """The server that has its folder; None: it was never begun."""


class Happened(NamedTuple):
    """An event to add to a job."""

    message: str
    level: Level = "info"
    data: JsonObject | None = None
    """Figures; None: the event is a message alone."""


class Checkpoint(NamedTuple):
    """The figures of a checkpoint; None: not measured."""

    step: int
    train_loss: float | None
    train_accuracy: float | None
    valid_loss: float | None
    valid_accuracy: float | None


@dataclass(slots=True)
class Progress:
    """How far a job is, and what happened since the last report."""

    step: int
    num_tokens: int
    """Tokens of the steps up to `step`."""
    num_steps: int
    events: list[Happened] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)


# --- what callers do ------------------------------------------------------------------------------


def create(session: TenantSession, new: NewJob, viewer: Principal) -> TuningJob:
    """Add a job, which waits for a server.

    Raises FileNotFound, InvalidValue for an unusable name or a file of another purpose,
    QuotaExceeded, also if the adapter may have no more versions, InsufficientQuota or, unless
    training is free, BudgetExhausted.
    """
    lock_tenant(session)
    check_adapter_name(new.adapter_name, param="suffix")
    training = _training_data(session, new.training_file_id, viewer, "training_file")
    validation = None
    if new.validation_file_id is not None:
        validation = _training_data(session, new.validation_file_id, viewer, "validation_file")
    num_open = session.scalar(
        select(func.count(TuningJob.id)).where(TuningJob.state.in_(OPEN_STATES))
    )
    if num_open is not None and num_open >= MAX_OPEN:
        raise QuotaExceeded("fine-tuning jobs that have not ended", limit=MAX_OPEN, used=num_open)
    quotas.check_room_for_version(session, new.adapter_name)
    _check_limits(session, new.token_price, payers_of(viewer.user_id, viewer.key_id))
    job = TuningJob(
        id=f"ftjob-{uuid.uuid4().hex}",
        adapter_name=new.adapter_name,
        created_by=new.created_by,
        user_id=viewer.user_id,
        key_id=viewer.key_id,
        training_file_id=training.id,
        training_sha256=training.sha256,
        validation_file_id=None if validation is None else validation.id,
        validation_sha256=None if validation is None else validation.sha256,
        recipe=new.recipe,
        labels=new.labels,
        state=JobState.QUEUED,
        num_steps=0,
        step=0,
        num_tokens=0,
        token_price=new.token_price,
        num_restarts=0,
        created_at=utc_now(),
    )
    session.add(job)
    session.flush()
    add_events(session, job.id, [Happened("The job was created.")])
    return job


def get_job(
    session: TenantSession,
    job_id: str,
    *,
    viewer: Principal | None = None,
    is_locked: bool = False,
) -> TuningJob:
    """The tenant's job, whose row is locked until the end of the unit of work if `is_locked`.
    Raises TuningJobNotFound, also if the viewer may not see it."""
    return _known(session, job_id, viewer, is_locked=is_locked)


def list_jobs(
    session: TenantSession, *, viewer: Principal, after: str | None, limit: int
) -> Sequence[TuningJob]:
    """At most `limit` jobs after the job `after`, the newest first."""
    query = select(TuningJob).order_by(TuningJob.created_at.desc(), TuningJob.id.desc())
    if viewer.adapters is not None:
        query = query.where(TuningJob.adapter_name.in_(viewer.adapters))
    if after is not None:
        last = select(TuningJob.created_at, TuningJob.id).where(TuningJob.id == after)
        place = tuple_(TuningJob.created_at, TuningJob.id)
        query = query.where(place < last.scalar_subquery())
    return session.scalars(query.limit(limit)).all()


def list_events(
    session: TenantSession, job_id: str, *, after: str | None, limit: int
) -> Sequence[TuningEvent]:
    """At most `limit` events of the job after the event `after`, the newest first."""
    query = select(TuningEvent).where(TuningEvent.job_id == job_id)
    if after is not None:
        last = select(TuningEvent.number).where(TuningEvent.id == after)
        query = query.where(TuningEvent.number < last.scalar_subquery())
    return session.scalars(query.order_by(TuningEvent.number.desc()).limit(limit)).all()


def list_checkpoints(
    session: TenantSession, job_id: str, *, after: str | None, limit: int
) -> Sequence[TuningCheckpoint]:
    """At most `limit` checkpoints of the job after the checkpoint `after`, the newest first."""
    query = select(TuningCheckpoint).where(TuningCheckpoint.job_id == job_id)
    if after is not None:
        last = select(TuningCheckpoint.step).where(TuningCheckpoint.id == after)
        query = query.where(TuningCheckpoint.step < last.scalar_subquery())
    return session.scalars(query.order_by(TuningCheckpoint.step.desc()).limit(limit)).all()


def cancel(session: TenantSession, job_id: str, *, viewer: Principal) -> tuple[TuningJob, bool]:
    """End the job without a result; returns it, and whether this ended it.

    Its trainer is killed within seconds. Raises TuningJobNotFound, or InvalidTransition if it has
    ended otherwise or is being published.
    """
    return _change(session, job_id, viewer, JobState.CANCELLED, "The job was cancelled.")


def cancel_all(session: TenantSession) -> None:
    """End every job that is not being published."""
    is_open = TuningJob.state.in_(OPEN_STATES)
    for job in _lock_jobs(session, is_open & TuningJob.finalizing_at.is_(None)):
        _move(session, job, JobState.CANCELLED, "The job was cancelled.")


def has_open(session: TenantSession) -> bool:
    """Whether a job has not ended."""
    query = select(TuningJob.id).where(TuningJob.state.in_(OPEN_STATES)).limit(1)
    return session.scalars(query).first() is not None


def pause(session: TenantSession, job_id: str, *, viewer: Principal) -> tuple[TuningJob, bool]:
    """Stop training until `resume`; returns the job, and whether this paused it.

    A job that waits for a budget does not go on by itself any more. Raises TuningJobNotFound, or
    InvalidTransition if it has ended or is being published.
    """
    message = "The job was paused."
    job, is_changed = _change(session, job_id, viewer, JobState.PAUSED, message)
    if not is_changed and job.pause_reason == PauseReason.BUDGET:
        is_changed = True
        add_events(session, job.id, [Happened(message)])
    if is_changed:
        _note_pause(session, job, PauseReason.REQUESTED)
    return job, is_changed


def resume(session: TenantSession, job_id: str, *, viewer: Principal) -> tuple[TuningJob, bool]:
    """Let a paused job wait for its turn; returns it, and whether this resumed it.

    Raises TuningJobNotFound, InvalidTransition if it has ended, InsufficientQuota or, unless its
    training is free, BudgetExhausted.
    """
    job = _known(session, job_id, viewer, is_locked=True)
    if job.state is JobState.RUNNING:
        return job, False
    if job.state is JobState.PAUSED:
        _check_limits(session, job.token_price, job.payers)
    job, is_changed = _change(session, job_id, viewer, JobState.QUEUED, "The job was resumed.")
    if is_changed:
        _announce(session, EventType.JOB_RESUMED, _told(job))
    return job, is_changed


def may_resume_within_budget(session: TenantSession) -> bool:
    """Whether a job that waits for a budget may go on."""
    jobs = session.scalars(select(TuningJob).where(_WAITS_FOR_BUDGET)).all()
    return any(not _is_over_budget(session, job) for job in jobs)


def resume_within_budget(session: TenantSession) -> int:
    """Let each job that waits for a budget wait for its turn, if none of its budgets is exhausted;
    returns how many."""
    waiting = _lock_jobs(session, _WAITS_FOR_BUDGET)
    jobs = [job for job in waiting if not _is_over_budget(session, job)]
    for job in jobs:
        _move(session, job, JobState.QUEUED, "The job was resumed: the budget allows it.")
        _announce(session, EventType.JOB_RESUMED, _told(job))
    return len(jobs)


def lock_jobs_of_key(session: TenantSession, key_id: str) -> Sequence[TuningJob]:
    """The key's jobs that have not ended, locked until the unit of work ends.

    Call it before anything that locks the tenant or its limits, as reports of steps do.
    """
    is_of_key = TuningJob.key_id == key_id
    return _lock_jobs(session, is_of_key & TuningJob.state.in_(OPEN_STATES))


def check_file_unused(session: TenantSession, file_id: str) -> None:
    """Raises FileInUse if a job that has not ended reads the file."""
    lock_tenant(session)
    uses = select(TuningJob.id).where(_reads(file_id), TuningJob.state.in_(OPEN_STATES)).limit(1)
    used_by = session.scalars(uses).first()
    if used_by is not None:
        raise FileInUse(f"The fine-tuning job `{used_by}` reads this file: cancel it first.")


def list_needed_files_of_all_tenants(session: PlatformSession) -> set[str]:
    """The ids of the files that jobs that have not ended read."""
    columns = (TuningJob.training_file_id, TuningJob.validation_file_id)
    rows = session.execute(select(*columns).where(TuningJob.state.in_(OPEN_STATES)))
    return {file_id for row in rows for file_id in row if file_id is not None}


# --- what the server that has the lease does ------------------------------------------------------


def list_turns_of_all_tenants(session: PlatformSession) -> Sequence[OpenJob]:
    """The next job of each tenant, in the order of their turns.

    First are jobs that were begun, then those of tenants whose last job began the longest ago. A
    suspended tenant has no turn.
    """
    found = session.execute(
        select(TuningJob, Tenant.slug)
        .join(Tenant, Tenant.id == TuningJob.tenant_id)
        .where(
            TuningJob.state.in_([JobState.QUEUED, JobState.RUNNING]), Tenant.suspended_at.is_(None)
        )
    ).all()
    slugs = {job.tenant_id: slug for job, slug in found}
    served = {
        row[0]: row[1]
        for row in session.execute(
            select(TuningJob.tenant_id, func.max(TuningJob.started_at))
            .where(TuningJob.tenant_id.in_(slugs))
            .group_by(TuningJob.tenant_id)
        )
        if row[1] is not None
    }

    def turn(job: TuningJob) -> tuple[bool, datetime, datetime, str]:
        never = datetime.min.replace(tzinfo=job.created_at.tzinfo)
        is_queued = job.state is JobState.QUEUED
        return is_queued, served.get(job.tenant_id, never), job.created_at, job.id

    turns: dict[str, OpenJob] = {}
    for job in sorted((job for job, _ in found), key=turn):
        open_job = OpenJob(job.tenant_id, slugs[job.tenant_id], job.id, job.server_id)
        turns.setdefault(job.tenant_id, open_job)
    return list(turns.values())


def list_waiting_for_budget_of_all_tenants(session: PlatformSession) -> Sequence[str]:
    """The ids of the tenants that have jobs which go on when a budget allows it."""
    return session.scalars(select(TuningJob.tenant_id).where(_WAITS_FOR_BUDGET).distinct()).all()


def list_kept_of_all_tenants(session: PlatformSession, server_id: str) -> set[str]:
    """The ids of the jobs whose folders this server has to keep."""
    query = select(TuningJob.id).where(
        TuningJob.server_id == server_id, TuningJob.state.in_(OPEN_STATES)
    )
    return set(session.scalars(query))


def begin(session: TenantSession, job_id: str, server_id: str) -> TuningJob:
    """This server trains the job from now on, unless it was paused or has ended, or a limit is
    reached."""
    job = _known(session, job_id, None, is_locked=True)
    if job.state is JobState.QUEUED:
        _pause_at_limit(session, job)
    if job.state not in {JobState.QUEUED, JobState.RUNNING}:
        return job
    is_elsewhere = job.server_id not in {None, server_id}
    if job.state is JobState.QUEUED:
        _go(job, JobState.RUNNING)
        add_events(session, job_id, [Happened("The job is running.")])
    if is_elsewhere:
        job.finalizing_at = None
        message = "The job's server is gone. Another one resumes it."
        add_events(session, job_id, [Happened(message, "warn")])
    job.server_id, job.started_at = server_id, utc_now()
    return job


def record(session: TenantSession, job_id: str, progress: Progress) -> TuningJob:
    """Keep the progress, and charge the tokens that no report had before. A job that has steps to
    do is paused if a limit is reached."""
    job = _known(session, job_id, None, is_locked=True)
    job.num_steps = progress.num_steps or job.num_steps
    add_events(session, job_id, progress.events)
    _add_checkpoints(session, job_id, progress.checkpoints)
    if progress.step >= job.step and progress.num_tokens > job.num_tokens:
        _charge(session, job, progress.num_tokens)
    job.step = max(job.step, progress.step)
    if job.state is JobState.RUNNING and job.step < job.num_steps:
        _pause_at_limit(session, job)
    return job


def note_restart(session: TenantSession, job_id: str, reason: str) -> TuningJob:
    """Its trainer ended without a result, and is started again."""
    job = _known(session, job_id, None, is_locked=True)
    job.num_restarts += 1
    add_events(session, job_id, [Happened(reason, "warn")])
    return job


def close(session: TenantSession, job_id: str) -> TuningJob:
    """It is trained: from now on its adapter is published, unless it was paused or cancelled."""
    job = _known(session, job_id, None, is_locked=True)
    if job.state is JobState.RUNNING:
        job.finalizing_at = job.finalizing_at or utc_now()
    return job


def succeed(session: TenantSession, job_id: str, *, version: int, base_id: str) -> TuningJob:
    """The adapter's version of this number is its result, and remembers how it was made."""
    job = _known(session, job_id, None, is_locked=True)
    _go(job, JobState.SUCCEEDED)
    job.version, job.ended_at = version, utc_now()
    _version_row(session, job.adapter_name, version).lineage = {
        "job": job.id,
        "base_id": base_id,
        "parent": None,
        "training_sha256": job.training_sha256,
        "validation_sha256": job.validation_sha256,
        "recipe": job.recipe,
    }
    message = f"The adapter is ready to be used: {job.adapter_name}@{version}."
    add_events(session, job_id, [Happened(message)])
    _announce_end(session, job, EventType.JOB_SUCCEEDED)
    return job


def fail(
    session: TenantSession, job_id: str, *, code: str, message: str, param: str | None = None
) -> TuningJob:
    """End the job with an error. A job that was paused or has ended stays as it is."""
    job = _known(session, job_id, None, is_locked=True)
    if job.state is not JobState.RUNNING:
        return job
    _go(job, JobState.FAILED)
    job.error_code, job.error_message, job.error_param = code, message, param
    job.ended_at = utc_now()
    add_events(session, job_id, [Happened(message, "error")])
    _announce_end(session, job, EventType.JOB_FAILED)
    return job


def add_events(session: TenantSession, job_id: str, events: Sequence[Happened]) -> None:
    """Add events to the job, and remove the oldest if there are too many."""
    if not events:
        return
    last = session.scalar(select(func.max(TuningEvent.number)).where(TuningEvent.job_id == job_id))
    number = last or 0
    for event in events:
        number += 1
        session.add(
            TuningEvent(
                id=f"ftevent-{uuid.uuid4().hex}",
                job_id=job_id,
                number=number,
                level=event.level,
                kind="message" if event.data is None else "metrics",
                message=event.message,
                data=event.data,
                created_at=utc_now(),
            )
        )
    session.flush()
    old = (TuningEvent.job_id == job_id, TuningEvent.number <= number - MAX_EVENTS)
    for row in session.scalars(select(TuningEvent).where(*old)):
        session.delete(row)


# --- removal --------------------------------------------------------------------------------------


def purge(session: PlatformSession, before: datetime, limit: int = 10) -> int:
    """Delete jobs that ended before this, with their events and checkpoints; returns how many. The
    lineage of their versions stays. A garbage collection removes objects that are left of them."""
    query = select(TuningJob).where(TuningJob.ended_at < before)
    return _remove(session, query.order_by(TuningJob.ended_at).limit(limit))


def remove_ended(session: TenantSession, adapter_name: str) -> int:
    """Delete the jobs of a deleted adapter that have ended; returns how many."""
    is_of_adapter = TuningJob.adapter_name == adapter_name
    return _remove(session, select(TuningJob).where(is_of_adapter, TuningJob.ended_at.is_not(None)))


def _remove(session: PlatformSession | TenantSession, query: Select[TuningJob]) -> int:
    jobs = session.scalars(query).all()
    job_ids = [job.id for job in jobs]
    for table in (TuningEvent, TuningCheckpoint, StoredCheckpoint):
        for row in session.scalars(select(table).where(table.job_id.in_(job_ids))):
            session.delete(row)
    session.flush()  # before the jobs that they refer to
    for job in jobs:
        session.delete(job)
    session.flush()
    return len(jobs)


# --- inside ---------------------------------------------------------------------------------------


def _version_row(session: TenantSession, adapter_name: str, number: int) -> AdapterVersion:
    query = (
        select(AdapterVersion)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.name == adapter_name, AdapterVersion.number == number)
    )
    return session.scalars(query).one()  # its row stays, whatever becomes of the version


def _training_data(
    session: TenantSession, file_id: str, viewer: Principal, param: str
) -> StoredFile:
    file = files.get_file(session, file_id, viewer=viewer)
    if file.purpose is not FilePurpose.FINE_TUNE:
        message = f"{param}: the purpose of this file is `{file.purpose}`, not `fine-tune`"
        raise InvalidValue(message, param=param)
    return file


def _known(
    session: TenantSession, job_id: str, viewer: Principal | None, *, is_locked: bool
) -> TuningJob:
    query = select(TuningJob).where(TuningJob.id == job_id)
    if is_locked:
        query = query.with_for_update()
    found = session.scalars(query).one_or_none()
    if found is None or (viewer is not None and not viewer.may_use(found.adapter_name)):
        raise TuningJobNotFound(f"There is no fine-tuning job `{job_id}`.")
    return found


def _change(
    session: TenantSession, job_id: str, viewer: Principal, target: JobState, message: str
) -> tuple[TuningJob, bool]:
    job = _known(session, job_id, viewer, is_locked=True)
    if job.state is target:
        return job, False
    if job.finalizing_at is not None:
        raise InvalidTransition(job.state, target)
    _move(session, job, target, message)
    return job, True


def _move(session: TenantSession, job: TuningJob, target: JobState, message: str) -> None:
    """Into another state, with an event."""
    _go(job, target)
    if target not in OPEN_STATES:
        job.ended_at = utc_now()
    add_events(session, job.id, [Happened(message)])


def _charge(session: TenantSession, job: TuningJob, num_tokens: int) -> None:
    """Charge what the job's total has grown by. The total is rounded, not its parts."""
    before, after = (
        amount_of_training(job.token_price, each) for each in (job.num_tokens, num_tokens)
    )
    at, amount = utc_now(), after - before
    if amount:
        budgets.spend(session, job.payers, amount, at)
    training = Training(
        adapter_name=job.adapter_name,
        num_tokens=num_tokens - job.num_tokens,
        amount=amount,
        user_id=job.user_id,
        key_id=job.key_id,
        at=at,
    )
    usage.add_training(session, training)
    job.num_tokens = num_tokens


def _check_limits(session: TenantSession, token_price: int, payers: Sequence[Holder]) -> None:
    """Raises InsufficientQuota or BudgetExhausted."""
    quotas.check_may_train(session)
    if token_price:
        budgets.check_left(session, payers)


def _pause_at_limit(session: TenantSession, job: TuningJob) -> None:
    if not quotas.may_train(session):
        reason = PauseReason.TRAINED_TOKENS
        cause = "the tenant's trained tokens of this period are used up."
    elif job.token_price and (budget := budgets.find_exhausted(session, job.payers)) is not None:
        reason, whose = PauseReason.BUDGET, possessive(budget.holder)
        cause = f"{whose} budget is exhausted. The job goes on when it allows."
    else:
        return
    _go(job, JobState.PAUSED)
    add_events(session, job.id, [Happened(f"The job was paused: {cause}", "warn")])
    _note_pause(session, job, reason)


def _is_over_budget(session: TenantSession, job: TuningJob) -> bool:
    return budgets.find_exhausted(session, job.payers) is not None


def _go(job: TuningJob, target: JobState) -> None:
    check_transition(job.state, target)
    job.state, job.pause_reason = target, None


_WAITS_FOR_BUDGET = (TuningJob.state == JobState.PAUSED) & (
    TuningJob.pause_reason == PauseReason.BUDGET.value
)


def _lock_jobs(session: TenantSession, are_wanted: ColumnElement[bool]) -> Sequence[TuningJob]:
    """These jobs, locked in the order of their ids, so that two units of work never deadlock."""
    query = select(TuningJob).where(are_wanted).order_by(TuningJob.id)
    return session.scalars(query.with_for_update()).all()


def _reads(file_id: str) -> ColumnElement[bool]:
    return (TuningJob.training_file_id == file_id) | (TuningJob.validation_file_id == file_id)


def _add_checkpoints(
    session: TenantSession, job_id: str, checkpoints: Sequence[Checkpoint]
) -> None:
    """A checkpoint of a step that has one already is left out."""
    steps = select(TuningCheckpoint.step).where(TuningCheckpoint.job_id == job_id)
    known = set(session.scalars(steps)) if checkpoints else set()
    for checkpoint in checkpoints:
        if checkpoint.step not in known:
            known.add(checkpoint.step)
            session.add(
                TuningCheckpoint(
                    id=f"ftckpt-{uuid.uuid4().hex[:32]}",
                    job_id=job_id,
                    created_at=utc_now(),
                    **checkpoint._asdict(),
                )
            )
    session.flush()
    surplus = sorted(known)[:-MAX_CHECKPOINTS]
    old = (TuningCheckpoint.job_id == job_id, TuningCheckpoint.step.in_(surplus))
    for row in session.scalars(select(TuningCheckpoint).where(*old)):
        session.delete(row)


def _told(job: TuningJob) -> JsonObject:
    """What each event says of a job."""
    return {"job": job.id, "adapter": job.adapter_name, "trained_tokens": job.num_tokens}


def _announce_end(session: TenantSession, job: TuningJob, event: EventType) -> None:
    _announce(session, event, {**_told(job), "version": job.version, "error": job.error_code})


def _note_pause(session: TenantSession, job: TuningJob, reason: PauseReason) -> None:
    job.pause_reason = reason.value
    _announce(session, EventType.JOB_PAUSED, {**_told(job), "reason": reason})


def _announce(session: TenantSession, event: EventType, data: JsonObject) -> None:
    announce(session, session.tenant_id, event, data)
