"""`/v1/adapters/{name}/aliases`: aliases, their history, and rollback.

A change applies to requests admitted from now on; running requests keep their version.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.adapters import service
from ...platform.adapters.canary_limits import CanaryLimits
from ...platform.adapters.models import AdapterAlias
from ...platform.adapters.service import Canary
from ...platform.audit.event import Changed, Event
from ...platform.base import JsonObject
from ...platform.errors import AliasNotFound, GateNotPassed
from ...platform.keys.principal import Principal
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.etags import TAGGED, IfMatch, tagged_response
from ..http.json_response import json_response
from ..schemas.adapters import ListView
from ..schemas.aliases import AliasBody, AliasChangeView, AliasView, CanaryBody
from ..server.runtime import CurrentRuntime, Runtime
from .adapter_views import alias_change_view, alias_view
from .evaluation_start import gate_error
from .parameters import NO_VERSION, Reader, RequestOrigin, Writer

DEFAULT_CHANGES = 50
MAX_CHANGES = 500
NO_ALIAS = ("adapter_not_found", "alias_not_found")

router = APIRouter(prefix="/v1/adapters/{name}/aliases")


@router.get("")
@answers(ListView[AliasView], errors=("adapter_not_found",))
async def list_aliases(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """The adapter's aliases and their current versions."""
    adapter = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_adapter(session, name)
    )
    return json_response(ListView([alias_view(name, alias) for alias in adapter.aliases]))


@router.get("/{alias}")
@answers(AliasView, errors=NO_ALIAS, headers=TAGGED)
async def get_alias(runtime: CurrentRuntime, principal: Reader, name: str, alias: str) -> Response:
    """The alias and its current version."""
    row = await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_alias(session, name, alias)
    )
    return _answer(name, row)


@router.put("/{alias}")
@answers(
    AliasView,
    errors=(
        *("adapter_not_ready", "base_mismatch", "gate_not_passed", "gate_refused"),
        *("model_not_found", "invalid_composition"),
        *NO_VERSION,
    ),
    headers=TAGGED,
)
async def set_alias(
    request: Request,
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    alias: str,
    if_match: IfMatch,
    body: Annotated[AliasBody, Depends(json_body(AliasBody))],
) -> Response:
    """Point the alias at a version, or split it between two; creates it if needed.

    With `If-Match`, the alias must exist. If the alias has a gate that is not passed, it is not
    changed, and the evaluation that the gate requires is started.
    """
    canary = None if body.canary is None else _canary(body.canary)
    if canary is not None and canary.limits is not None:
        await _check_judge(runtime, principal, canary.limits.judged_by)

    def change(session: TenantSession) -> Changed[AdapterAlias]:
        if_match.check(_view_to_change(session, name, alias))
        row = service.set_alias(
            session,
            name,
            alias,
            body.version,
            canary=canary,
            override_reason=body.override,
            changed_by=principal.actor.author,
        )
        event = _event("alias.set", name, row)
        if body.override is not None:
            event.details["override"] = body.override
        return Changed(row, event)

    try:
        changed = await runtime.control_plane.change(principal.tenant_id, origin, change)
    except GateNotPassed as exc:
        raise await gate_error(request, runtime, principal, origin, name, exc) from exc
    return _answer(name, changed)


@router.delete("/{alias}")
@answers(errors=NO_ALIAS)
async def remove_alias(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    alias: str,
    if_match: IfMatch,
) -> Response:
    """Remove the alias; running requests that used it continue."""

    def change(session: TenantSession) -> Changed[None]:
        if_match.check(alias_view(name, service.get_alias_to_change(session, name, alias)))
        service.remove_alias(session, name, alias, changed_by=principal.actor.author)
        return Changed(None, Event("alias.remove", f"{name}@{alias}"))

    await runtime.control_plane.change(principal.tenant_id, origin, change)
    return Response(status_code=204)


@router.post("/{alias}/rollback")
@answers(AliasView, errors=("nothing_to_roll_back", *NO_ALIAS), headers=TAGGED)
async def roll_back_alias(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    alias: str,
    if_match: IfMatch,
) -> Response:
    """Undo the alias's last change; a repeated rollback undoes the one before it."""

    def change(session: TenantSession) -> Changed[AdapterAlias]:
        if_match.check(alias_view(name, service.get_alias_to_change(session, name, alias)))
        row = service.rollback_alias(session, name, alias, changed_by=principal.actor.author)
        return Changed(row, _event("alias.rollback", name, row))

    changed = await runtime.control_plane.change(principal.tenant_id, origin, change)
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
    """The latest changes, newest first."""
    changes = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_alias_changes(session, name, alias, limit=limit),
    )
    return json_response(ListView([alias_change_view(change) for change in changes]))


async def _check_judge(runtime: Runtime, principal: Principal, judge: str | None) -> None:
    """Raises a PlatformError or ApiError for a judge that the caller cannot use."""
    if judge is None:
        return
    model = await runtime.inference.models.resolve(principal, judge)
    if model.composition is not None or model.classification is not None:
        message = "judge_model: must be the base model or an adapter that generates text"
        raise ApiError("invalid_parameter", message, param="canary.limits.judge_model")


def _canary(body: CanaryBody) -> Canary:
    limits = None if body.limits is None else CanaryLimits(**body.limits.model_dump())
    return Canary(body.version, body.percent, limits)


def _view_to_change(session: TenantSession, name: str, alias: str) -> AliasView | None:
    try:
        return alias_view(name, service.get_alias_to_change(session, name, alias))
    except AliasNotFound:
        return None


def _event(action: str, name: str, alias: AdapterAlias) -> Event:
    details: JsonObject = {"version": alias.version.number}
    if alias.canary_version is not None:
        details["canary"] = {
            "version": alias.canary_version.number,
            "percent": alias.canary_percent,
            "limits": alias.canary_limits,
        }
    return Event(action, f"{name}@{alias.name}", details)


def _answer(name: str, alias: AdapterAlias) -> Response:
    return tagged_response(alias_view(name, alias))
