"""`/admin/tenants`: create, change and suspend tenants. For operators without a tenant."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.sessions import PlatformSession
from ...platform.tenants import service
from ...platform.tenants.models import Tenant
from ...platform.tenants.summaries import list_summaries
from ..contract.promises import answers
from ..http.auth import Confirmation, origin_of, read_confirmation, require_operator
from ..http.bodies import json_body
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.identity import TenantBody, TenantChange, TenantSummaryView, TenantView
from ..schemas.slo import slo_of
from ..server.runtime import CurrentRuntime
from .identity_views import tenant_summary_view, tenant_view
from .pages import Page

router = APIRouter(prefix="/admin/tenants")

Search = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=64,
        pattern=r"^[^\x00]+$",
        description="Part of the slug or the name.",
    ),
]

Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]


@router.get("")
@answers(PageView[TenantSummaryView])
async def list_tenants(
    runtime: CurrentRuntime,
    operator: Reader,
    page: Page,
    suspended: Annotated[bool | None, Query()] = None,
    search: Search = None,
) -> Response:
    """List tenants by slug, with their usage of the last 30 days."""
    rows = await runtime.control_plane.read_all_tenants(
        lambda session: list_summaries(
            session,
            after=page.after,
            limit=page.num_rows,
            is_suspended=suspended,
            search=search,
        )
    )
    return json_response(
        page.answer(rows, view=tenant_summary_view, cursor=lambda row: row.tenant.slug)
    )


@router.post("")
@answers(TenantView, 201, errors=("tenant_exists",), headers=TAGGED)
async def create_tenant(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    body: Annotated[TenantBody, Depends(json_body(TenantBody))],
) -> Response:
    """Create a tenant.

    It has no key yet.
    """

    def create(session: PlatformSession) -> Changed[TenantView]:
        tenant = service.create_tenant(
            session, body.slug, name=body.name, weight=body.weight, slo=slo_of(body.slo)
        )
        details: dict[str, Any] = {"name": tenant.name, "weight": tenant.weight}
        if tenant.slo:
            details["slo"] = asdict(tenant.slo)
        return Changed(tenant_view(tenant), Event("tenant.create", tenant.slug, details))

    view = await runtime.control_plane.change_platform(origin_of(request, operator), create)
    return tagged_response(view, status_code=201)


@router.get("/{slug}")
@answers(TenantView, errors=("tenant_not_found",), headers=TAGGED)
async def get_tenant(runtime: CurrentRuntime, operator: Reader, slug: str) -> Response:
    """One tenant."""
    tenant = await runtime.control_plane.read_all_tenants(
        lambda session: service.get_tenant(session, slug)
    )
    return tagged_response(tenant_view(tenant))


@router.patch("/{slug}")
@answers(TenantView, errors=("tenant_not_found",), headers=TAGGED)
async def change_tenant(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    slug: str,
    if_match: IfMatch,
    confirmation: Annotated[Confirmation, Depends(read_confirmation)],
    body: Annotated[TenantChange, Depends(json_body(TenantChange))],
) -> Response:
    """Rename, suspend or resume a tenant, or change its weight or service level objective.

    Every server refuses a suspended tenant's keys within five seconds. Running requests finish, and
    its adapters stay. In a session, suspending requires a recent password confirmation.
    """
    if "suspended" in body.model_fields_set:
        confirmation.check()

    def change(session: PlatformSession) -> Changed[TenantView]:
        tenant = service.get_tenant_to_change(session, slug)
        before = tenant_view(tenant)
        if_match.check(before)
        _apply(tenant, body)
        return _changed(before, tenant_view(tenant))

    view = await runtime.control_plane.change_platform(origin_of(request, operator), change)
    return tagged_response(view)


def _apply(tenant: Tenant, body: TenantChange) -> None:
    sent = body.model_fields_set
    if "name" in sent:
        service.rename(tenant, body.name)
    if "weight" in sent:
        service.set_weight(tenant, body.weight)
    if "slo" in sent:
        service.set_slo(tenant, slo_of(body.slo))
    if "suspended" in sent:
        service.set_suspended(tenant, body.suspended)


def _changed(before: TenantView, after: TenantView) -> Changed[TenantView]:
    details: dict[str, Any] = {}
    for name in ("name", "weight"):
        if getattr(before, name) != getattr(after, name):
            details[name] = getattr(after, name)
    if before.slo != after.slo:
        details["slo"] = asdict(after.slo)
    is_suspended = after.suspended_at is not None
    if is_suspended != (before.suspended_at is not None):
        details["suspended"] = is_suspended
    return Changed(after, Event("tenant.change", after.slug, details) if details else None)
