"""`/v1/fine_tuning/jobs`: adapters that are trained from files, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...platform.adapters.lookup import no_adapter
from ...platform.audit.event import Changed, Event
from ...platform.base import utc_now
from ...platform.keys.principal import Principal
from ...platform.sessions import TenantSession
from ...platform.tuning import service
from ...platform.tuning.models import TuningCheckpoint, TuningEvent, TuningJob
from ...platform.tuning.service import NewJob
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.batches import CursorPage
from ..schemas.tuning import (
    TuningCheckpointView,
    TuningEventView,
    TuningJobBody,
    TuningJobView,
)
from ..server.runtime import CurrentRuntime, Runtime
from ..tuning.recipes import resolve_recipe
from .parameters import Reader, RequestOrigin, Writer
from .tuning_views import checkpoint_view, event_view, job_view

router = APIRouter(prefix="/v1/fine_tuning/jobs")

MAX_JOBS_PAGE = 100
MAX_EVENTS_PAGE = 1000

View = TypeVar("View", TuningJobView, TuningEventView, TuningCheckpointView)
After = Annotated[str | None, Query(max_length=64)]
PageSize = Annotated[int, Query(ge=1, le=MAX_JOBS_PAGE)]


@router.post("")
@answers(
    TuningJobView,
    errors=(
        *("tuning_disabled", "model_not_tunable", "file_not_found", "quota_exceeded"),
        *("adapter_not_found", "engine_unavailable"),
        *("insufficient_quota", "budget_exhausted"),
    ),
)
async def create_job(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    body: Annotated[TuningJobBody, Depends(json_body(TuningJobBody))],
) -> Response:
    """Train an adapter from a file. The result is a version of the adapter `suffix`.

    A tenant's jobs run one after the other, while the engine has no requests or little to do.
    """
    _check_enabled(runtime)
    name = _adapter_name(runtime, principal, body)
    if body.model != runtime.inference.served_model_name:
        message = f"model: {body.model!r} is not the base model"
        raise ApiError("model_not_tunable", message, param="model")
    price = (await runtime.pricing.tariff(principal.tenant_id)).at(utc_now())
    new = NewJob(
        adapter_name=name,
        training_file_id=body.training_file,
        validation_file_id=body.validation_file,
        recipe=msgspec.to_builtins(resolve_recipe(body, runtime.engine.info)),
        labels=body.metadata,
        created_by=principal.actor.author,
        token_price=0 if price is None else price.trained,
    )

    def create(session: TenantSession) -> Changed[TuningJob]:
        job = service.create(session, new, principal)
        details = {"adapter": job.adapter_name, "training_file": job.training_file_id}
        return Changed(job, Event("job.create", job.id, details))

    job = await runtime.control_plane.change(principal.tenant_id, origin, create)
    return json_response(_view(runtime, principal, job))


@router.get("")
@answers(CursorPage[TuningJobView])
async def list_jobs(
    runtime: CurrentRuntime, principal: Reader, after: After = None, limit: PageSize = 20
) -> Response:
    """List the tenant's jobs, the newest first."""
    found = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_jobs(session, viewer=principal, after=after, limit=limit + 1),
    )
    return json_response(_page([_view(runtime, principal, job) for job in found], limit))


@router.get("/{job_id}")
@answers(TuningJobView, errors=("tuning_job_not_found",))
async def get_job(runtime: CurrentRuntime, principal: Reader, job_id: str) -> Response:
    """One job."""
    job = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_job(session, job_id, viewer=principal)
    )
    return json_response(_view(runtime, principal, job))


@router.get("/{job_id}/events")
@answers(CursorPage[TuningEventView], errors=("tuning_job_not_found",))
async def list_events(
    runtime: CurrentRuntime,
    principal: Reader,
    job_id: str,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS_PAGE)] = 20,
) -> Response:
    """List the job's events, the newest first. The last 1000 are kept."""

    def read(session: TenantSession) -> list[TuningEvent]:
        job = service.get_job(session, job_id, viewer=principal)
        return list(service.list_events(session, job.id, after=after, limit=limit + 1))

    found = await runtime.control_plane.read(principal.tenant_id, read)
    return json_response(_page(list(map(event_view, found)), limit))


@router.get("/{job_id}/checkpoints")
@answers(CursorPage[TuningCheckpointView], errors=("tuning_job_not_found",))
async def list_checkpoints(
    runtime: CurrentRuntime,
    principal: Reader,
    job_id: str,
    after: After = None,
    limit: PageSize = 10,
) -> Response:
    """List the job's checkpoints, the newest first. The last 100 are kept."""

    def read(session: TenantSession) -> list[TuningCheckpoint]:
        job = service.get_job(session, job_id, viewer=principal)
        return list(service.list_checkpoints(session, job.id, after=after, limit=limit + 1))

    found = await runtime.control_plane.read(principal.tenant_id, read)
    return json_response(_page(list(map(checkpoint_view, found)), limit))


@router.post("/{job_id}/cancel")
@answers(TuningJobView, errors=("tuning_job_not_found", "state_conflict"))
async def cancel_job(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, job_id: str
) -> Response:
    """End a job without a result. The tokens that were trained are charged."""

    def cancel(session: TenantSession) -> Changed[TuningJob]:
        job, is_new = service.cancel(session, job_id, viewer=principal)
        return Changed(job, Event("job.cancel", job.id) if is_new else None)

    job = await runtime.control_plane.change(principal.tenant_id, origin, cancel)
    return json_response(_view(runtime, principal, job))


@router.post("/{job_id}/pause")
@answers(TuningJobView, errors=("tuning_job_not_found", "state_conflict"))
async def pause_job(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, job_id: str
) -> Response:
    """Pause a job at its next checkpoint, until it is resumed."""

    def pause(session: TenantSession) -> Changed[TuningJob]:
        job, is_new = service.pause(session, job_id, viewer=principal)
        return Changed(job, Event("job.pause", job.id) if is_new else None)

    job = await runtime.control_plane.change(principal.tenant_id, origin, pause)
    return json_response(_view(runtime, principal, job))


@router.post("/{job_id}/resume")
@answers(
    TuningJobView,
    errors=(
        *("tuning_disabled", "tuning_job_not_found", "state_conflict"),
        *("insufficient_quota", "budget_exhausted"),
    ),
)
async def resume_job(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, job_id: str
) -> Response:
    """Let a paused job go on from its checkpoint, when its turn comes."""
    _check_enabled(runtime)

    def resume(session: TenantSession) -> Changed[TuningJob]:
        job, is_new = service.resume(session, job_id, viewer=principal)
        return Changed(job, Event("job.resume", job.id) if is_new else None)

    job = await runtime.control_plane.change(principal.tenant_id, origin, resume)
    return json_response(_view(runtime, principal, job))


def _check_enabled(runtime: Runtime) -> None:
    if runtime.tuning is None:
        raise ApiError("tuning_disabled")


def _adapter_name(runtime: Runtime, principal: Principal, body: TuningJobBody) -> str:
    """The name of the adapter that is made. Raises ApiError or AdapterNotFound."""
    param = "adapter" if body.suffix is None else "suffix"
    name = body.adapter if body.suffix is None else body.suffix
    if name is None or body.adapter not in {None, name}:
        message = "suffix: name the adapter of which the result becomes a version"
        raise ApiError("invalid_parameter", message, param="suffix")
    if not principal.may_use(name):
        raise no_adapter(name)
    if runtime.inference.served_model_name in {name, f"{principal.tenant_slug}/{name}"}:
        raise ApiError("invalid_parameter", "The base model has this name.", param=param)
    return name


def _view(runtime: Runtime, principal: Principal, job: TuningJob) -> TuningJobView:
    return job_view(
        job, base_name=runtime.inference.served_model_name, tenant_slug=principal.tenant_slug
    )


def _page(views: list[View], limit: int) -> CursorPage[View]:
    """`views`: one more than the limit if there are more."""
    shown = views[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return CursorPage(shown, len(views) > limit, first, last)
