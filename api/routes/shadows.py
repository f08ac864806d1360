"""`/v1/adapters/{name}/aliases/{alias}/shadow`: a version that answers copies of requests."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.adapters import shadows
from ...platform.adapters.shadow_models import AliasShadow
from ...platform.audit.event import Changed, Event
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.shadows import ShadowBody, ShadowView
from ..server.runtime import CurrentRuntime
from .aliases import NO_ALIAS
from .parameters import NO_VERSION, Reader, RequestOrigin, Writer

NO_SHADOW = ("shadow_not_found", *NO_ALIAS)

router = APIRouter(prefix="/v1/adapters/{name}/aliases/{alias}/shadow")


@router.get("")
@answers(ShadowView, errors=NO_SHADOW)
async def get_shadow(runtime: CurrentRuntime, principal: Reader, name: str, alias: str) -> Response:
    """The alias's shadow, and how its answers compare with the live ones."""
    row = await runtime.control_plane.read(
        principal.tenant_id, lambda session: shadows.get_shadow(session, name, alias)
    )
    return json_response(_view(name, row))


@router.put("")
@answers(ShadowView, errors=("alias_not_found", "adapter_not_ready", "base_mismatch", *NO_VERSION))
async def set_shadow(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    alias: str,
    body: Annotated[ShadowBody, Depends(json_body(ShadowBody))],
) -> Response:
    """Have a version answer copies of a share of the alias's requests. The answers are compared and
    never shown; their tokens are charged. A comparison begins at zero."""

    def change(session: TenantSession) -> Changed[AliasShadow]:
        row = shadows.set_shadow(
            session, name, alias, body.version, body.percent, set_by=principal.actor.author
        )
        details = {"version": body.version, "percent": body.percent}
        return Changed(row, Event("shadow.set", f"{name}@{alias}", details))

    row = await runtime.control_plane.change(principal.tenant_id, origin, change)
    return json_response(_view(name, row))


@router.delete("")
@answers(errors=NO_SHADOW)
async def remove_shadow(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, name: str, alias: str
) -> Response:
    """End the shadow; its comparison is lost."""

    def change(session: TenantSession) -> Changed[None]:
        shadows.remove_shadow(session, name, alias)
        return Changed(None, Event("shadow.remove", f"{name}@{alias}"))

    await runtime.control_plane.change(principal.tenant_id, origin, change)
    return Response(status_code=204)


def _view(name: str, row: AliasShadow) -> ShadowView:
    num = row.num_compared
    return ShadowView(
        adapter=name,
        alias=row.alias,
        version=row.version_number,
        percent=row.percent,
        set_by=row.set_by,
        since=row.since,
        compared=num,
        errors=row.num_errors,
        equal=row.num_equal,
        rouge_l=row.rouge_sum / num if num else None,
        rouge_l_counts=list(row.rouge_counts),
        length_ratio=math.exp(row.log_length_sum / num) if num else None,
    )
