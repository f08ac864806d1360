"""`/v1/adapters/{name}/aliases/{alias}/gate`: what a version must pass before the alias moves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.evaluations import gates
from ...platform.evaluations.gates import NewGate
from ...platform.evaluations.models import AliasGate
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.evaluations import GateBody, GateView
from ..server.runtime import CurrentRuntime
from .evaluation_views import gate_view
from .parameters import Reader, RequestOrigin, Writer

router = APIRouter(prefix="/v1/adapters/{name}/aliases/{alias}/gate")

NO_GATE = ("adapter_not_found", "gate_not_found")


@router.get("")
@answers(GateView, errors=NO_GATE)
async def get_gate(runtime: CurrentRuntime, principal: Reader, name: str, alias: str) -> Response:
    """The gate of the alias."""
    row = await runtime.control_plane.read(
        principal.tenant_id, lambda session: gates.get(session, name, alias)
    )
    return json_response(gate_view(row))


@router.put("")
@answers(GateView, errors=("adapter_not_found", "golden_set_not_found"))
async def put_gate(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    alias: str,
    body: Annotated[GateBody, Depends(json_body(GateBody))],
) -> Response:
    """Let the alias move only to versions that lose no more than the tolerance on a golden set.

    The alias need not exist. Its present version is not evaluated.
    """
    new = NewGate(name, alias, body.golden_set, body.tolerance, principal.actor.author)

    def put(session: TenantSession) -> Changed[AliasGate]:
        row = gates.put(session, new)
        details = {"golden_set": row.golden_set_name, "tolerance": row.tolerance}
        return Changed(row, Event("gate.put", f"{name}@{alias}", details))

    row = await runtime.control_plane.change(principal.tenant_id, origin, put)
    return json_response(gate_view(row))


@router.delete("")
@answers(errors=NO_GATE)
async def remove_gate(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, name: str, alias: str
) -> Response:
    """Remove the gate; the alias moves freely."""

    def remove(session: TenantSession) -> Changed[None]:
        gates.remove(session, name, alias)
        return Changed(None, Event("gate.remove", f"{name}@{alias}"))

    await runtime.control_plane.change(principal.tenant_id, origin, remove)
    return Response(status_code=204)
