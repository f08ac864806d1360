"""`DELETE /admin/tenants/{slug}` and `/admin/tenant-deletions`: delete a tenant as a whole."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.errors import InvalidValue
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.tenants import deletion as service
from ..contract.promises import answers
from ..http.auth import Confirmed, origin_of, require_operator
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.identity import TenantDeletionView
from ..server.runtime import CurrentRuntime
from .identity_views import tenant_deletion_view
from .pages import Page

router = APIRouter(prefix="/admin")

Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]


@router.delete("/tenants/{slug}")
@answers(TenantDeletionView, 202, errors=("tenant_not_found",))
async def delete_tenant(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    confirmed: Confirmed,
    slug: str,
    confirm: Annotated[str, Query(description="The slug again.")],
    with_usage: Annotated[bool, Query(description="Delete the usage records too.")] = False,
) -> Response:
    """Delete a tenant and everything that it has.

    The tenant is hidden at once. Its adapters, files, batches, stored responses, keys, users,
    webhooks and budgets are removed in the background: the response has the deletion as it begins.
    Usage records stay, without keys and users, unless `with_usage` is true. The slug can be used
    again when the deletion has finished. Repeating the request returns the same deletion until
    then.
    """
    if confirm != slug:
        raise InvalidValue("`confirm` must be the slug of the tenant.", param="confirm")
    origin = origin_of(request, operator)
    deletion = await runtime.tenant_deletions.delete(slug, origin, with_usage=with_usage)
    return json_response(tenant_deletion_view(deletion), status_code=202)


@router.get("/tenant-deletions")
@answers(PageView[TenantDeletionView])
async def list_tenant_deletions(runtime: CurrentRuntime, operator: Reader, page: Page) -> Response:
    """List the deletions of tenants by id."""
    rows = await runtime.control_plane.read_all_tenants(
        lambda session: service.list_deletions(session, after=page.after, limit=page.num_rows)
    )
    return json_response(page.answer(rows, view=tenant_deletion_view, cursor=lambda row: row.id))


@router.get("/tenant-deletions/{tenant_id}")
@answers(TenantDeletionView, errors=("tenant_deletion_not_found",))
async def get_tenant_deletion(
    runtime: CurrentRuntime, operator: Reader, tenant_id: str
) -> Response:
    """The deletion of a tenant, with its receipt."""
    deletion = await runtime.control_plane.read_all_tenants(
        lambda session: service.get(session, tenant_id)
    )
    return json_response(tenant_deletion_view(deletion))
