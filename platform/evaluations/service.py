"""Creates evaluations, gives them batches, and ends them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import func, or_, select, tuple_
from sqlalchemy.orm import undefer

from ..adapters import repository
from ..adapters.lookup import get_bare_adapter, get_ready_version
from ..adapters.models import AdapterVersion
from ..adapters.registry import DEFAULT_ALIAS
from ..base import utc_now
from ..batches import files
from ..batches import service as batch_service
from ..batches.file_models import StoredFile
from ..batches.models import Batch
from ..batches.service import NewBatch
from ..batches.states import OPEN_STATES as OPEN_BATCH_STATES
from ..batches.states import BatchState
from ..errors import EvaluationNotFound, FileInUse, InvalidValue, QuotaExceeded
from ..quotas.repository import lock_tenant
from ..sessions import PlatformSession, TenantSession
from ..webhooks.event_types import EventType
from ..webhooks.outbox import announce
from .golden_sets import get as get_golden_set
from .models import Evaluation
from .states import OPEN_STATES, EvaluationState, check_transition

BASE: Final = "base"
"""In place of a version to compare with."""
MAX_OPEN = 20
"""Evaluations of one tenant that have not ended."""
_STOPPABLE = frozenset({BatchState.VALIDATING, BatchState.IN_PROGRESS})


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvaluation:
    """What a caller asks for."""

    adapter_name: str
    golden_set: str
    version: int
    against: int | Literal["base"] | None
    """None: the version that requests for the adapter get, or the base if that is `version`."""
    base_name: str
    key_id: str
    address: str | None
    created_by: str


class OpenEvaluation(NamedTuple):
    """An evaluation that has not ended, and whose it is."""

    tenant_id: str
    evaluation_id: str


# --- what callers do ------------------------------------------------------------------------------


def create(session: TenantSession, new: NewEvaluation) -> Evaluation:
    """Add an evaluation, whose requests are asked by a server.

    Raises AdapterNotFound, VersionNotFound, AdapterNotReady, GoldenSetNotFound, InvalidValue if the
    version is to be compared with itself, or QuotaExceeded.
    """
    lock_tenant(session)
    golden_set = get_golden_set(session, new.adapter_name, new.golden_set)
    version = get_ready_version(session, new.adapter_name, new.version)
    against = _find_against(session, new, version)
    num_open = session.scalar(
        select(func.count(Evaluation.id)).where(Evaluation.state.in_(OPEN_STATES))
    )
    if num_open is not None and num_open >= MAX_OPEN:
        raise QuotaExceeded("evaluations that have not ended", limit=MAX_OPEN, used=num_open)
    evaluation = Evaluation(
        id=f"eval-{uuid.uuid4().hex}",
        adapter_name=new.adapter_name,
        golden_set_name=golden_set.name,
        file_id=golden_set.file_id,
        sha256=golden_set.sha256,
        num_cases=golden_set.num_cases,
        tolerance=golden_set.tolerance,
        judge=golden_set.judge,
        base_name=new.base_name,
        version_number=version.number,
        version_digest=version.digest,
        against_number=None if against is None else against.number,
        against_digest=None if against is None else against.digest,
        key_id=new.key_id,
        address=new.address,
        state=EvaluationState.QUEUED,
        batches={},
        created_by=new.created_by,
        created_at=utc_now(),
    )
    session.add(evaluation)
    session.flush()
    return evaluation


def get_evaluation(session: TenantSession, adapter_name: str, evaluation_id: str) -> Evaluation:
    """The adapter's evaluation with its cases. Raises EvaluationNotFound."""
    query = select(Evaluation).options(undefer(Evaluation.cases))
    query = query.where(Evaluation.id == evaluation_id, Evaluation.adapter_name == adapter_name)
    found = session.scalars(query).one_or_none()
    if found is None:
        raise _no_evaluation(evaluation_id)
    return found


def list_evaluations(
    session: TenantSession, adapter_name: str, *, after: str | None, limit: int
) -> Sequence[Evaluation]:
    """At most `limit` evaluations of the adapter after the evaluation `after`, the newest first,
    without their cases. Raises AdapterNotFound."""
    get_bare_adapter(session, adapter_name)
    query = select(Evaluation).where(Evaluation.adapter_name == adapter_name)
    if after is not None:
        last = select(Evaluation.created_at, Evaluation.id).where(Evaluation.id == after)
        place = tuple_(Evaluation.created_at, Evaluation.id)
        query = query.where(place < last.scalar_subquery())
    query = query.order_by(Evaluation.created_at.desc(), Evaluation.id.desc())
    return session.scalars(query.limit(limit)).all()


def cancel(
    session: TenantSession, adapter_name: str, evaluation_id: str
) -> tuple[Evaluation, bool]:
    """End the evaluation and its batch without a report; returns it, and whether this ended it.

    Raises EvaluationNotFound, or InvalidTransition if it has ended otherwise.
    """
    evaluation = get_known(session, evaluation_id)
    if evaluation.adapter_name != adapter_name:
        raise _no_evaluation(evaluation_id)
    if evaluation.state is EvaluationState.CANCELLED:
        return evaluation, False
    _cancel(session, evaluation)
    return evaluation, True


def cancel_all(session: TenantSession) -> None:
    """End every evaluation."""
    query = select(Evaluation).where(Evaluation.state.in_(OPEN_STATES)).with_for_update()
    for evaluation in session.scalars(query).all():
        _cancel(session, evaluation)


def has_open(session: TenantSession) -> bool:
    """Whether an evaluation has not ended."""
    query = select(Evaluation.id).where(Evaluation.state.in_(OPEN_STATES)).limit(1)
    return session.scalars(query).first() is not None


def check_file_unused(session: TenantSession, file_id: str) -> None:
    """Raises FileInUse if an evaluation that has not ended reads the file."""
    query = select(Evaluation.id).where(
        Evaluation.file_id == file_id, Evaluation.state.in_(OPEN_STATES)
    )
    used_by = session.scalars(query.limit(1)).first()
    if used_by is not None:
        raise FileInUse(f"The evaluation `{used_by}` reads this file: cancel it first.")


def list_needed_files_of_all_tenants(session: PlatformSession) -> set[str]:
    """The ids of the files that evaluations that have not ended read."""
    return set(session.scalars(select(Evaluation.file_id).where(Evaluation.state.in_(OPEN_STATES))))


# --- what the server that has the lease does ------------------------------------------------------


def list_ready_of_all_tenants(session: PlatformSession) -> Sequence[OpenEvaluation]:
    """The evaluations that have not ended and wait for no batch, the oldest first."""
    query = (
        select(Evaluation.tenant_id, Evaluation.id)
        .outerjoin(Batch, Batch.id == Evaluation.batch_id)
        .where(
            Evaluation.state.in_(OPEN_STATES),
            or_(Batch.id.is_(None), Batch.state.not_in(OPEN_BATCH_STATES)),
        )
        .order_by(Evaluation.created_at, Evaluation.id)
    )
    return [OpenEvaluation(*row) for row in session.execute(query)]


def begin(session: TenantSession, evaluation_id: str) -> Evaluation:
    """A server works on it, unless it has ended. Raises EvaluationNotFound."""
    evaluation = get_known(session, evaluation_id)
    if evaluation.state is EvaluationState.QUEUED:
        _go(evaluation, EvaluationState.RUNNING)
        evaluation.started_at = utc_now()
    return evaluation


def list_batches(session: TenantSession, evaluation: Evaluation) -> dict[str, Batch | None]:
    """Its batches by what they ask for; None: it is gone."""
    ids = list(evaluation.batches.values())
    found = {row.id: row for row in session.scalars(select(Batch).where(Batch.id.in_(ids)))}
    return {name: found.get(batch_id) for name, batch_id in evaluation.batches.items()}


def add_batch(
    session: TenantSession, evaluation_id: str, name: str, file: StoredFile, endpoint: str
) -> Evaluation:
    """Ask the lines of this file, whose bytes are in the store, and wait for the answers.

    An evaluation that has ended or asks for this already stays as it is. Raises EvaluationNotFound
    or QuotaExceeded.
    """
    evaluation = get_known(session, evaluation_id)
    if evaluation.state not in OPEN_STATES or name in evaluation.batches:
        return evaluation
    files.add_upload(session, file)
    new = NewBatch(
        endpoint=endpoint,
        input_file_id=file.id,
        key_id=evaluation.key_id,
        address=evaluation.address,
        labels={"evaluation": evaluation.id},
    )
    batch = batch_service.create(session, new, None)
    evaluation.batch_id = batch.id
    evaluation.batches = {**evaluation.batches, name: batch.id}
    return evaluation


def succeed(
    session: TenantSession,
    evaluation_id: str,
    *,
    is_regression: bool,
    slices: list[Any],
    cases: list[Any],
) -> Evaluation:
    """End it with this report. An evaluation that has ended stays as it is."""
    evaluation = get_known(session, evaluation_id)
    if evaluation.state in OPEN_STATES:
        evaluation.is_regression, evaluation.slices, evaluation.cases = is_regression, slices, cases
        _end(session, evaluation, EvaluationState.SUCCEEDED)
    return evaluation


def fail(session: TenantSession, evaluation_id: str, *, code: str, message: str) -> Evaluation:
    """End it with an error. An evaluation that has ended stays as it is."""
    evaluation = get_known(session, evaluation_id)
    if evaluation.state in OPEN_STATES:
        evaluation.error_code, evaluation.error_message = code, message
        _end(session, evaluation, EvaluationState.FAILED)
    return evaluation


def get_known(session: TenantSession, evaluation_id: str) -> Evaluation:
    """The tenant's evaluation, locked until this unit of work ends. Raises EvaluationNotFound."""
    query = select(Evaluation).where(Evaluation.id == evaluation_id).with_for_update()
    found = session.scalars(query).one_or_none()
    if found is None:
        raise _no_evaluation(evaluation_id)
    return found


# --- removal --------------------------------------------------------------------------------------


def purge(session: PlatformSession, before: datetime, limit: int = 50) -> int:
    """Delete evaluations that ended before this; returns how many."""
    query = select(Evaluation).where(Evaluation.ended_at < before).order_by(Evaluation.ended_at)
    ended = session.scalars(query.limit(limit)).all()
    for evaluation in ended:
        session.delete(evaluation)
    return len(ended)


def remove_all(session: TenantSession, adapter_name: str) -> None:
    """Cancel and delete the evaluations of a deleted adapter."""
    query = select(Evaluation).where(Evaluation.adapter_name == adapter_name).with_for_update()
    for evaluation in session.scalars(query).all():
        if evaluation.state in OPEN_STATES:
            _cancel(session, evaluation)
        session.delete(evaluation)
    session.flush()


# --- inside ---------------------------------------------------------------------------------------


def _find_against(
    session: TenantSession, new: NewEvaluation, version: AdapterVersion
) -> AdapterVersion | None:
    """The version to compare with; None: the base."""
    if new.against == BASE:
        return None
    if new.against is not None:
        against = get_ready_version(session, new.adapter_name, new.against)
        if against.id == version.id:
            raise InvalidValue("against: is the version itself", param="against")
        return against
    alias = repository.find_alias(session, version.adapter_id, DEFAULT_ALIAS)
    if alias is not None:
        served: AdapterVersion | None = alias.version
    else:
        served = repository.find_newest_ready_version(session, version.adapter_id)
    return None if served is None or served.id == version.id else served


def _cancel(session: TenantSession, evaluation: Evaluation) -> None:
    _end(session, evaluation, EvaluationState.CANCELLED)
    batch = None
    if evaluation.batch_id is not None:
        query = select(Batch).where(Batch.id == evaluation.batch_id)
        batch = session.scalars(query).one_or_none()
    if batch is not None and batch.state in _STOPPABLE:
        batch_service.cancel(session, batch.id, viewer=None)


def _end(session: TenantSession, evaluation: Evaluation, state: EvaluationState) -> None:
    _go(evaluation, state)
    evaluation.ended_at = utc_now()
    data = {
        "evaluation": evaluation.id,
        "adapter": evaluation.adapter_name,
        "golden_set": evaluation.golden_set_name,
        "version": evaluation.version_number,
        "against": evaluation.against_number,
        "state": evaluation.state,
        "is_regression": evaluation.is_regression,
        "error": evaluation.error_code,
    }
    announce(session, session.tenant_id, EventType.EVALUATION_FINISHED, data)


def _go(evaluation: Evaluation, target: EvaluationState) -> None:
    check_transition(evaluation.state, target)
    evaluation.state = target


def _no_evaluation(evaluation_id: str) -> EvaluationNotFound:
    return EvaluationNotFound(f"There is no evaluation `{evaluation_id}`.")
