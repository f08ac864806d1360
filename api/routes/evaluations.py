"""`/v1/adapters/{name}/evaluations`: comparisons of versions on golden sets."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.evaluations import service
from ...platform.evaluations.models import Evaluation
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.batches import CursorPage
from ..schemas.evaluations import EvaluationBody, EvaluationView
from ..server.runtime import CurrentRuntime
from .evaluation_start import EvaluationRequest, start_evaluation
from .evaluation_views import evaluation_view
from .parameters import NO_VERSION, Reader, RequestOrigin, Writer

router = APIRouter(prefix="/v1/adapters/{name}/evaluations")

MAX_PAGE = 100


@router.post("")
@answers(
    EvaluationView,
    errors=(
        *("key_required", "insufficient_scope", "adapter_not_ready", "quota_exceeded"),
        *NO_VERSION,
        "golden_set_not_found",
    ),
)
async def create_evaluation(
    request: Request,
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    body: Annotated[EvaluationBody, Depends(json_body(EvaluationBody))],
) -> Response:
    """Compare a version with another one and the base on a golden set.

    The requests run as batches, while the engine has no other requests, and are charged as such.
    They are requests of the caller's key; for callers without a key, of their newest key that may
    infer, or else of the key that set the golden set.
    """
    wanted = EvaluationRequest(name, body.golden_set, body.version, body.against)
    row = await start_evaluation(request, runtime, principal, origin, wanted)
    return json_response(evaluation_view(row, with_cases=False))


@router.get("")
@answers(CursorPage[EvaluationView], errors=("adapter_not_found",))
async def list_evaluations(
    runtime: CurrentRuntime,
    principal: Reader,
    name: str,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
) -> Response:
    """The adapter's evaluations, the newest first."""
    found = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_evaluations(session, name, after=after, limit=limit + 1),
    )
    views = [evaluation_view(row, with_cases=False) for row in found[:limit]]
    first, last = (views[0].id, views[-1].id) if views else (None, None)
    return json_response(CursorPage(views, len(found) > limit, first, last))


@router.get("/{evaluation_id}")
@answers(EvaluationView, errors=("evaluation_not_found",))
async def get_evaluation(
    runtime: CurrentRuntime, principal: Reader, name: str, evaluation_id: str
) -> Response:
    """One evaluation, with its report."""
    row = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_evaluation(session, name, evaluation_id)
    )
    return json_response(evaluation_view(row, with_cases=True))


@router.post("/{evaluation_id}/cancel")
@answers(EvaluationView, errors=("evaluation_not_found", "state_conflict"))
async def cancel_evaluation(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    evaluation_id: str,
) -> Response:
    """End an evaluation and its batch. Requests that were answered are charged."""

    def cancel(session: TenantSession) -> Changed[Evaluation]:
        row, is_new = service.cancel(session, name, evaluation_id)
        return Changed(row, Event("evaluation.cancel", row.id) if is_new else None)

    row = await runtime.control_plane.change(principal.tenant_id, origin, cancel)
    return json_response(evaluation_view(row, with_cases=False))
