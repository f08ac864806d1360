"""`/v1/adapters/{name}/aliases`: which version a name means, and what it meant before.

Requests admitted from now on follow an alias; running ones stay where they began.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...platform.adapters import service
from ...platform.adapters.models import AdapterAlias
from ...platform.adapters.service import Canary
from ..bodies import json_body
from ..contract import answers
from ..json_response import json_response
from ..runtime import CurrentRuntime
from ..schemas.adapters import ListView
from ..schemas.aliases import AliasBody, AliasChangeView, AliasView
from .adapter_views import alias_change_view, alias_view
from .parameters import NO_VERSION, Reader, Writer

DEFAULT_CHANGES = 50
MAX_CHANGES = 500
NO_ALIAS = ("adapter_not_found", "alias_not_found")

router = APIRouter(prefix="/v1/adapters/{name}/aliases")


@router.get("")
@answers(ListView[AliasView], errors=("adapter_not_found",))
async def list_aliases(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """What the adapter's aliases mean now."""
    adapter = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_adapter(session, name)
    )
    return json_response(ListView([alias_view(name, alias) for alias in adapter.aliases]))


@router.put("/{alias}")
@answers(AliasView, errors=("adapter_not_ready", "base_mismatch", *NO_VERSION))
async def set_alias(
    runtime: CurrentRuntime,
    principal: Writer,
    name: str,
    alias: str,
    body: Annotated[AliasBody, Depends(json_body(AliasBody))],
) -> Response:
    """Point the alias at a version, or split it between two."""
    canary = Canary(body.canary.version, body.canary.percent) if body.canary else None
    changed = await runtime.control_plane.write(
        principal.tenant_id,
        lambda session: service.set_alias(
            session, name, alias, body.version, canary=canary, changed_by=principal.key_id
        ),
    )
    return _answer(name, changed)


@router.delete("/{alias}")
@answers(errors=NO_ALIAS)
async def remove_alias(
    runtime: CurrentRuntime, principal: Writer, name: str, alias: str
) -> Response:
    """Forget the alias; running requests that came by it go on."""
    await runtime.control_plane.write(
        principal.tenant_id,
        lambda session: service.remove_alias(session, name, alias, changed_by=principal.key_id),
    )
    return Response(status_code=204)


@router.post("/{alias}/rollback")
@answers(AliasView, errors=("nothing_to_roll_back", *NO_ALIAS))
async def roll_back_alias(
    runtime: CurrentRuntime, principal: Writer, name: str, alias: str
) -> Response:
    """Back to what the alias meant before its last change; again, to what it meant before that."""
    changed = await runtime.control_plane.write(
        principal.tenant_id,
        lambda session: service.rollback_alias(session, name, alias, changed_by=principal.key_id),
    )
    return _answer(name, changed)


@router.get("/{alias}/history")
@answers(ListView[AliasChangeView], errors=NO_ALIAS)
async def list_alias_changes(
    runtime: CurrentRuntime,
    principal: Reader,
    name: str,
    alias: str,
    limit: Annotated[int, Query(ge=1, le=MAX_CHANGES)] = DEFAULT_CHANGES,
) -> Response:
    """The latest changes, the newest first."""
    changes = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_alias_changes(session, name, alias, limit=limit),
    )
    return json_response(ListView([alias_change_view(change) for change in changes]))


def _answer(name: str, alias: AdapterAlias) -> Response:
    return json_response(alias_view(name, alias))
