"""`/v1/adapters/{name}/versions/{n}`: pin, prefetch, and readiness of a version.

A pin or prefetch is stored before the response; the servers reconcile their state with it, now and
after every restart.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...engine.errors import EngineError
from ...engine.messages import AdapterExplanation
from ...platform.adapters import wishes
from ...platform.adapters.states import WishKind
from ...platform.audit.event import Changed, Event, Origin
from ...platform.keys.principal import Principal
from ...platform.sessions import TenantSession
from ..adapters.version_readiness import judge
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.residency import ReadinessView, WishBody
from ..server.runtime import CurrentRuntime, Runtime
from .adapter_views import readiness_view
from .parameters import (
    NO_VERSION,
    FoundVersion,
    Number,
    Reader,
    RequestOrigin,
    Writer,
    find_version,
)

router = APIRouter(prefix="/v1/adapters/{name}/versions/{number}")

Wished = Annotated[WishBody, Depends(json_body(WishBody))]


@router.get("/readiness")
@answers(ReadinessView, errors=NO_VERSION)
async def get_readiness(
    runtime: CurrentRuntime, principal: Reader, name: str, number: Number
) -> Response:
    """Whether the version is ready, and what it waits for."""
    return json_response(await _readiness(runtime, principal, name, number))


@router.put("/pin")
@answers(ReadinessView, 202, errors=("adapter_not_ready", "too_many_pins", *NO_VERSION))
async def pin(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    number: Number,
    body: Wished,
) -> Response:
    """Keep the version on the device until it is unpinned, or for `ttl_seconds`."""
    await wish_for(runtime, principal, origin, name, number, WishKind.PIN, body.ttl_seconds)
    return json_response(await _readiness(runtime, principal, name, number), status_code=202)


@router.delete("/pin")
@answers(ReadinessView, 202, errors=NO_VERSION)
async def unpin(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, name: str, number: Number
) -> Response:
    """Unpin the version: it may be evicted again."""
    await remove_pin(runtime, principal, origin, name, number)
    return json_response(await _readiness(runtime, principal, name, number), status_code=202)


@router.post("/prefetch")
@answers(ReadinessView, 202, errors=("adapter_not_ready", *NO_VERSION))
async def prefetch(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    number: Number,
    body: Wished,
) -> Response:
    """Load the version to the device before a request needs it."""
    await wish_for(runtime, principal, origin, name, number, WishKind.PREFETCH, body.ttl_seconds)
    return json_response(await _readiness(runtime, principal, name, number), status_code=202)


async def wish_for(
    runtime: Runtime,
    principal: Principal,
    origin: Origin,
    name: str,
    number: int,
    kind: WishKind,
    ttl_seconds: float | None = None,
) -> None:
    """Store the wish and begin with it. Raises a PlatformError."""

    def write(session: TenantSession) -> Changed[None]:
        wishes.set_wish(
            session,
            name,
            number,
            kind,
            ttl_seconds=ttl_seconds,
            created_by=principal.actor.author,
            max_pins=runtime.settings.max_pins,
        )
        event = Event(f"version.{kind}", f"{name}@{number}", {"ttl_seconds": ttl_seconds})
        return Changed(None, event)

    await runtime.control_plane.change(principal.tenant_id, origin, write)
    runtime.reconciliation.hasten()
    found = await find_version(runtime, principal, name, number)
    if found.version.base_id == runtime.engine.info.base_id:
        runtime.engine.prefetch(found.key, stay_seconds=ttl_seconds or 0.0)


async def remove_pin(
    runtime: Runtime, principal: Principal, origin: Origin, name: str, number: int
) -> None:
    """Unpin the version, if it is pinned. Raises a PlatformError."""

    def remove(session: TenantSession) -> Changed[None]:
        was_pinned = wishes.remove_wish(session, name, number, WishKind.PIN)
        return Changed(None, Event("version.unpin", f"{name}@{number}") if was_pinned else None)

    await runtime.control_plane.change(principal.tenant_id, origin, remove)
    runtime.reconciliation.hasten()


async def _readiness(
    runtime: Runtime, principal: Principal, name: str, number: int
) -> ReadinessView:
    found = await find_version(runtime, principal, name, number)
    standing = await runtime.control_plane.read(
        principal.tenant_id, lambda session: wishes.list_wishes(session, name)
    )
    explanation = await _explain(runtime, found)
    sees_machine = principal.operator_role is not None
    full_name = f"{principal.tenant_slug}/{name}@{number}"
    judged = judge(
        full_name,
        found.version,
        base_id=runtime.engine.info.base_id,
        is_engine_ready=runtime.engine.is_ready,
        is_quarantined=runtime.engine.is_quarantined(found.key),
        load=explanation.load if explanation else None,
        sees_machine=sees_machine,
    )
    own = [wish for wish in standing if wish.version_id == found.version.id]
    return readiness_view(
        full_name,
        found.adapter,
        found.version,
        judged,
        wishes=own,
        explanation=explanation,
        sees_machine=sees_machine,
    )


async def _explain(runtime: Runtime, found: FoundVersion) -> AdapterExplanation | None:
    """The engine's explanation; None if it is not ready."""
    if not runtime.engine.is_ready:
        return None
    try:
        return await runtime.engine.explain_adapter(found.key)
    except EngineError:
        return None
