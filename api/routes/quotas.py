"""`/v1/quota`: a tenant's limits and usage; `/admin/tenants/{slug}/quota`: setting the limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.quotas import service
from ...platform.quotas.service import Limits, QuotaUse
from ...platform.sessions import TenantSession
from ...platform.tenants.service import get_tenant
from ..contract.promises import answers
from ..http.auth import origin_of, require, require_operator
from ..http.bodies import json_body
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.quotas import LimitsBody, LimitsView, LimitUseView, QuotaUseView
from ..server.runtime import CurrentRuntime, Runtime

router = APIRouter()

Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]


@router.get("/v1/quota")
@answers(QuotaUseView)
async def get_use(
    runtime: CurrentRuntime, principal: Annotated[Principal, Depends(require(Scope.USAGE_READ))]
) -> Response:
    """The tenant's limits, with usage and remainder."""
    use = await runtime.control_plane.read(principal.tenant_id, service.current_use)
    return json_response(_use_view(use))


@router.get("/admin/tenants/{slug}/quota")
@answers(LimitsView, errors=("tenant_not_found",), headers=TAGGED)
async def get_limits(runtime: CurrentRuntime, operator: Reader, slug: str) -> Response:
    """The tenant's limits."""
    tenant_id = await _tenant_id(runtime, slug)
    limits = await runtime.control_plane.read(tenant_id, service.get_limits)
    return tagged_response(_limits_view(slug, limits))


@router.put("/admin/tenants/{slug}/quota")
@answers(LimitsView, errors=("tenant_not_found",), headers=TAGGED)
async def set_limits(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    slug: str,
    if_match: IfMatch,
    body: Annotated[LimitsBody, Depends(json_body(LimitsBody))],
) -> Response:
    """Replace the tenant's limits.

    They apply from the next request on; a tenant's first limits reach other servers within seconds.
    """
    limits = Limits(**body.model_dump(include=set(LimitsBody.model_fields)))

    def change(session: TenantSession) -> Changed[LimitsView]:
        before = service.lock_limits(session)
        if_match.check(_limits_view(slug, before))
        service.set_limits(session, limits)
        return Changed(_limits_view(slug, limits), _event(slug, before, limits))

    tenant_id = await _tenant_id(runtime, slug)
    view = await runtime.control_plane.change(tenant_id, origin_of(request, operator), change)
    return tagged_response(view)


async def _tenant_id(runtime: Runtime, slug: str) -> str:
    tenant = await runtime.control_plane.read_all_tenants(lambda session: get_tenant(session, slug))
    return tenant.id


def _event(slug: str, before: Limits, after: Limits) -> Event | None:
    """The changes; None if there are none."""
    old = asdict(before)
    details = {name: value for name, value in asdict(after).items() if value != old[name]}
    return Event("quota.set", slug, details) if details else None


def _limits_view(slug: str, limits: Limits) -> LimitsView:
    return LimitsView(tenant=slug, **asdict(limits))


def _use_view(use: QuotaUse) -> QuotaUseView:
    uses: dict[str, Any] = {name: LimitUseView(**asdict(limit)) for name, limit in use.uses.items()}
    return QuotaUseView(
        **uses,
        period=use.limits.period,
        period_begins_at=use.period_begins_at,
        period_ends_at=use.period_ends_at,
    )
