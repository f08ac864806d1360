"""`/v1/memory` and `/admin/memory`: the position of adapters and the use of KV blocks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.adapters import repository
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.tenants import repository as tenants
from ..contract.promises import answers
from ..http.auth import require, require_operator
from ..http.json_response import json_response
from ..schemas.memory import MemoryView
from ..server.runtime import CurrentRuntime
from .memory_views import OwnMemoryViews, PlatformMemoryViews

router = APIRouter()

Reader = Annotated[Principal, Depends(require(Scope.ADAPTERS_READ))]
Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]


@router.get("/v1/memory")
@answers(MemoryView)
async def get_memory(runtime: CurrentRuntime, principal: Reader) -> Response:
    """The memory that the tenant's own adapters use on each live server; others are not shown."""
    seen = await runtime.memories.all()
    contents = await runtime.control_plane.read(principal.tenant_id, repository.list_live_contents)
    visible = [content for content in contents if principal.may_use(content.adapter_name)]
    views = OwnMemoryViews(visible, principal)
    return json_response(MemoryView([views.server(each) for each in seen]))


@router.get("/admin/memory")
@answers(MemoryView)
async def get_platform_memory(runtime: CurrentRuntime, operator: Operator) -> Response:
    """The memory of each live server: current for this server, last reported for the others."""
    seen = await runtime.memories.all()
    contents = await runtime.control_plane.read_all_tenants(repository.list_live_contents)
    slugs = await runtime.control_plane.read_all_tenants(tenants.slugs_by_id)
    views = PlatformMemoryViews(contents, slugs)
    return json_response(MemoryView([views.server(each) for each in seen]))
