"""`/v1/batches`: files of requests that are answered in the background, as in OpenAI's API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.batches import service
from ...platform.batches.models import Batch
from ...platform.batches.service import Counts, NewBatch
from ...platform.batches.states import BatchState
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.auth import require
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.batches import (
    BatchBody,
    BatchErrors,
    BatchErrorView,
    BatchView,
    CursorPage,
    RequestCounts,
)
from ..server.runtime import CurrentRuntime
from .parameters import RequestOrigin

router = APIRouter(prefix="/v1/batches")

Caller = Annotated[Principal, Depends(require(Scope.INFER))]
MAX_BATCHES_PAGE = 100


@router.post("")
@answers(BatchView, errors=("file_not_found", "key_required", "quota_exceeded"))
async def create_batch(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    origin: RequestOrigin,
    body: Annotated[BatchBody, Depends(json_body(BatchBody))],
) -> Response:
    """Create a batch: each line of the file is answered as a request of the caller's key.

    Lines run while the engine has no other requests. The results are files. A line is charged once,
    with its result.
    """
    if principal.key_id is None:
        raise ApiError("key_required")
    address = request.state.address
    new = NewBatch(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        key_id=principal.key_id,
        address=None if address is None else str(address),
        labels=body.metadata,
    )

    def create(session: TenantSession) -> Changed[Batch]:
        batch = service.create(session, new, principal)
        details = {"endpoint": batch.endpoint, "input_file": batch.input_file_id}
        return Changed(batch, Event("batch.create", batch.id, details))

    batch = await runtime.control_plane.change(principal.tenant_id, origin, create)
    return json_response(batch_view(batch, Counts(0, 0)))


@router.get("")
@answers(CursorPage[BatchView])
async def list_batches(
    runtime: CurrentRuntime,
    principal: Caller,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_BATCHES_PAGE)] = 20,
) -> Response:
    """List the tenant's batches, the newest first; those of the key itself if it is restricted to
    adapters."""

    def read(session: TenantSession) -> list[BatchView]:
        found = service.list_batches(session, viewer=principal, after=after, limit=limit + 1)
        return [batch_view(batch, service.count_results(session, batch)) for batch in found]

    views = await runtime.control_plane.read(principal.tenant_id, read)
    shown = views[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(CursorPage(shown, len(views) > limit, first, last))


@router.get("/{batch_id}")
@answers(BatchView, errors=("batch_not_found",))
async def get_batch(runtime: CurrentRuntime, principal: Caller, batch_id: str) -> Response:
    """One batch."""

    def read(session: TenantSession) -> BatchView:
        batch = service.get_batch(session, batch_id, viewer=principal)
        return batch_view(batch, service.count_results(session, batch))

    return json_response(await runtime.control_plane.read(principal.tenant_id, read))


@router.post("/{batch_id}/cancel")
@answers(BatchView, errors=("batch_not_found", "state_conflict"))
async def cancel_batch(
    runtime: CurrentRuntime, principal: Caller, origin: RequestOrigin, batch_id: str
) -> Response:
    """Cancel a batch. Requests that run are aborted; the results so far become files."""

    def cancel(session: TenantSession) -> Changed[BatchView]:
        batch, is_new = service.cancel(session, batch_id, viewer=principal)
        view = batch_view(batch, service.count_results(session, batch))
        return Changed(view, Event("batch.cancel", batch.id) if is_new else None)

    view = await runtime.control_plane.change(principal.tenant_id, origin, cancel)
    return json_response(view)


def batch_view(batch: Batch, counts: Counts) -> BatchView:
    ended = {batch.state: _seconds(batch.ended_at)}
    errors = None
    if batch.errors is not None:
        errors = BatchErrors([BatchErrorView(**error) for error in batch.errors])
    return BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=errors,
        input_file_id=batch.input_file_id,
        completion_window="24h",
        status=batch.state,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(batch.created_at.timestamp()),
        in_progress_at=_seconds(batch.in_progress_at),
        expires_at=int(batch.expires_at.timestamp()),
        finalizing_at=_seconds(batch.finalizing_at),
        completed_at=ended.get(BatchState.COMPLETED),
        failed_at=ended.get(BatchState.FAILED),
        expired_at=ended.get(BatchState.EXPIRED),
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=ended.get(BatchState.CANCELLED),
        request_counts=RequestCounts(batch.num_lines, counts.completed, counts.failed),
        metadata=batch.labels,
    )


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
