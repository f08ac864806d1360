"""`/v1/requests` and `/admin/requests`: finished requests with their phases, and running ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import AwareDatetime
from starlette.requests import Request
from starlette.responses import Response

from ...engine.messages import RequestList, RequestState
from ...engine.reports.requests import REASONS
from ...platform.audit.event import Changed, Event
from ...platform.errors import RequestNotFound
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.requests import service
from ...platform.requests.models import RequestLogEntry
from ...platform.requests.repository import LogFilter
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..control_plane.tenant_names import tenant_names
from ..http.auth import origin_of, require, require_operator
from ..http.json_response import json_response
from ..inference.inference import OpenRequest
from ..schemas.adapters import PageView
from ..schemas.requests import ExplanationView, LiveRequestsView, LiveRequestView, RequestView
from ..server.runtime import CurrentRuntime, Runtime
from ..telemetry.request_explanation import phases_of, summary_of
from .pages import Page

MAX_LIVE = 500

router = APIRouter()

Reader = Annotated[Principal, Depends(require(Scope.USAGE_READ))]
Owner = Annotated[Principal, Depends(require(Scope.INFER))]
Operator = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIVE)]


async def read_filter(
    adapter: Annotated[str | None, Query(max_length=64)] = None,
    code: Annotated[str | None, Query(max_length=64, description="The error's code.")] = None,
    status: Annotated[int | None, Query(ge=0, le=599)] = None,
    since: Annotated[AwareDatetime | None, Query()] = None,
    until: Annotated[AwareDatetime | None, Query()] = None,
) -> LogFilter:
    """Which entries the query asks for."""
    return LogFilter(adapter=adapter, code=code, status=status, since=since, until=until)


Wanted = Annotated[LogFilter, Depends(read_filter)]


@router.get("/v1/requests")
@answers(PageView[RequestView])
async def list_requests(
    runtime: CurrentRuntime, principal: Reader, page: Page, wanted: Wanted
) -> Response:
    """The tenant's finished requests, newest first."""
    await runtime.request_log.flush()
    visible = replace(wanted, visible=principal.adapters)
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_newest(
            session, visible, before=page.after, limit=page.num_rows
        ),
    )
    slug = principal.tenant_slug
    return json_response(
        page.answer(rows, view=lambda row: _view(row, slug), cursor=service.cursor_of)
    )


@router.get("/v1/requests/live")
@answers(LiveRequestsView, errors=("engine_unavailable",))
async def list_live_requests(
    runtime: CurrentRuntime, principal: Reader, limit: Limit = 100
) -> Response:
    """The tenant's sequences in this server's engine, oldest first."""
    listed = await runtime.engine.list_requests(principal.tenant_id, limit=limit)
    names = {principal.tenant_id: principal.tenant_slug}
    view = _live_view(runtime, listed, names)
    if principal.adapters is not None:
        mine = [entry for entry in view.data if _is_visible(runtime, entry, principal)]
        view = LiveRequestsView(mine, len(mine))
    return json_response(view)


@router.get("/v1/requests/{request_id}")
@answers(ExplanationView, errors=("request_not_found",))
async def explain_request(runtime: CurrentRuntime, principal: Reader, request_id: str) -> Response:
    """One finished request: where its time went, or why it was refused."""
    await runtime.request_log.flush()
    entry = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get(session, request_id)
    )
    if not principal.may_use(entry.adapter_name):
        raise RequestNotFound(f"You have no request with the id {request_id!r}.")
    return json_response(_explanation(entry, principal.tenant_slug))


@router.delete("/v1/requests/{request_id}")
@answers(errors=("request_not_found",))
async def cancel_request(
    request: Request, runtime: CurrentRuntime, principal: Owner, request_id: str
) -> Response:
    """Cancel a request that runs on this server; its caller gets `request_cancelled`."""
    found = runtime.inference.find_open(request_id)
    if found is None or not _is_theirs(found, principal):
        raise RequestNotFound(f"You have no request with the id {request_id!r} running here.")

    def note(session: TenantSession) -> Changed[None]:
        return Changed(None, Event("request.cancel", request_id))

    await runtime.control_plane.change(principal.tenant_id, origin_of(request, principal), note)
    found.generation.cancel()
    return Response(status_code=204)


@router.get("/admin/requests")
@answers(PageView[RequestView])
async def list_all_requests(
    runtime: CurrentRuntime, operator: Operator, page: Page, wanted: Wanted
) -> Response:
    """The finished requests of all tenants, newest first."""
    await runtime.request_log.flush()
    rows = await runtime.control_plane.read_all_tenants(
        lambda session: service.list_newest(session, wanted, before=page.after, limit=page.num_rows)
    )
    names = await tenant_names(runtime.control_plane, {row.tenant_id for row in rows})
    return json_response(
        page.answer(
            rows, view=lambda row: _view(row, names[row.tenant_id]), cursor=service.cursor_of
        )
    )


@router.get("/admin/requests/live")
@answers(LiveRequestsView, errors=("engine_unavailable",))
async def list_all_live_requests(
    runtime: CurrentRuntime, operator: Operator, limit: Limit = 100
) -> Response:
    """All sequences in this server's engine, oldest first."""
    listed = await runtime.engine.list_requests(limit=limit)
    names = await tenant_names(
        runtime.control_plane, {state.tenant_id for state in listed.requests}
    )
    return json_response(_live_view(runtime, listed, names))


@router.get("/admin/requests/{request_id}")
@answers(ExplanationView, errors=("request_not_found",))
async def explain_any_request(
    runtime: CurrentRuntime, operator: Operator, request_id: str
) -> Response:
    """One finished request of any tenant: where its time went, or why it was refused."""
    await runtime.request_log.flush()
    entry = await runtime.control_plane.read_all_tenants(
        lambda session: service.get_for_any_tenant(session, request_id)
    )
    names = await tenant_names(runtime.control_plane, {entry.tenant_id})
    return json_response(_explanation(entry, names[entry.tenant_id]))


def _explanation(entry: RequestLogEntry, tenant: str) -> ExplanationView:
    return ExplanationView(_view(entry, tenant), summary_of(entry), phases_of(entry))


def _view(entry: RequestLogEntry, tenant: str) -> RequestView:
    return RequestView(
        id=entry.request_id,
        tenant=tenant,
        created_at=entry.created_at,
        route=entry.route,
        status=entry.status,
        error_code=entry.error_code,
        model=entry.model,
        adapter=entry.adapter_name,
        adapter_version=entry.adapter_version,
        key_id=entry.key_id,
        finish_reason=entry.finish_reason,
        tier=entry.tier,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        completion_tokens=entry.completion_tokens,
        queue_ms=entry.queue_ms,
        adapter_wait_ms=entry.adapter_wait_ms,
        load_ms=entry.load_ms,
        first_token_ms=entry.first_token_ms,
        total_ms=entry.total_ms,
    )


def _live_view(runtime: Runtime, listed: RequestList, names: dict[str, str]) -> LiveRequestsView:
    views = [_live(runtime, state, names.get(state.tenant_id, "")) for state in listed.requests]
    return LiveRequestsView(views, listed.num_requests)


def _live(runtime: Runtime, state: RequestState, tenant: str) -> LiveRequestView:
    request_id, _, index = state.request_id.rpartition("-")
    found = runtime.inference.find_open(request_id)
    return LiveRequestView(
        request_id=request_id if found else state.request_id,
        index=int(index) if found else 0,
        tenant=tenant,
        model=found.order.model.name if found else None,
        state=state.state,
        waits_for=state.waits_for,
        reason=None if state.waits_for is None else REASONS[state.waits_for],
        age_ms=1000 * state.age_seconds,
        prompt_tokens=state.num_prompt_tokens,
        computed_tokens=state.num_computed_tokens,
        generated_tokens=state.num_generated_tokens,
        preemptions=state.num_preemptions,
        priority=state.priority,
    )


def _is_visible(runtime: Runtime, entry: LiveRequestView, principal: Principal) -> bool:
    found = runtime.inference.find_open(entry.request_id)
    return found is not None and _is_theirs(found, principal)


def _is_theirs(found: OpenRequest, principal: Principal) -> bool:
    adapters = found.order.model.adapters
    is_same_tenant = found.order.principal.tenant_id == principal.tenant_id
    if not adapters:
        return is_same_tenant and principal.may_use(None)
    return is_same_tenant and all(principal.may_use(each.name) for each in adapters)
