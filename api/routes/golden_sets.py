"""`/v1/adapters/{name}/golden-sets`: cases on which versions of an adapter are compared."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.batches.file_models import StoredFile
from ...platform.evaluations import golden_sets
from ...platform.evaluations.golden_sets import NewGoldenSet
from ...platform.evaluations.models import GoldenSetRow
from ...platform.keys.principal import Scope
from ...platform.names import check_golden_set_name
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.adapters import ListView
from ..schemas.evaluations import GoldenSetBody, GoldenSetView
from ..server.runtime import CurrentRuntime
from .evaluation_views import golden_set_view
from .parameters import Reader, RequestOrigin, Writer

router = APIRouter(prefix="/v1/adapters/{name}/golden-sets")

NO_SET = ("adapter_not_found", "golden_set_not_found")


@router.get("")
@answers(ListView[GoldenSetView], errors=("adapter_not_found",))
async def list_golden_sets(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """The adapter's golden sets, by name."""
    found = await runtime.control_plane.read(
        principal.tenant_id, lambda session: golden_sets.list_sets(session, name)
    )
    return json_response(ListView([golden_set_view(row) for row in found]))


@router.get("/{golden_set}")
@answers(GoldenSetView, errors=NO_SET)
async def get_golden_set(
    runtime: CurrentRuntime, principal: Reader, name: str, golden_set: str
) -> Response:
    """One golden set."""
    row = await runtime.control_plane.read(
        principal.tenant_id, lambda session: golden_sets.get(session, name, golden_set)
    )
    return json_response(golden_set_view(row))


@router.put("/{golden_set}")
@answers(
    GoldenSetView,
    errors=(
        *("adapter_not_found", "file_not_found", "invalid_golden_set", "quota_exceeded"),
        *("tenant_queue_full", "overloaded", "storage_full", "store_unavailable", "store_denied"),
    ),
)
async def put_golden_set(
    request: Request,
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    golden_set: str,
    body: Annotated[GoldenSetBody, Depends(json_body(GoldenSetBody))],
) -> Response:
    """Set a golden set: its file is checked, and kept as long as the set has it.

    Evaluations of callers who have no key use the key that set the golden set.
    """
    check_golden_set_name(golden_set)

    def find(session: TenantSession) -> StoredFile:
        return golden_sets.get_cases_file(session, body.file, viewer=principal)

    file = await runtime.control_plane.read(principal.tenant_id, find)
    checked = await runtime.evaluations.check_golden_set(principal.tenant_id, file)
    if checked.has_judge and body.judge is None:
        message = "judge: name the model that judges the cases with the scorer `judge`"
        raise ApiError("invalid_parameter", message, param="judge")
    may_ask = principal.can(Scope.INFER) and principal.adapters is None
    address = request.state.address
    new = NewGoldenSet(
        adapter_name=name,
        name=golden_set,
        file_id=file.id,
        num_cases=checked.num_cases,
        tolerance=body.tolerance,
        judge=body.judge,
        key_id=principal.key_id if may_ask else None,
        address=None if address is None else str(address),
        created_by=principal.actor.author,
    )

    def put(session: TenantSession) -> Changed[GoldenSetRow]:
        row = golden_sets.put(session, new, principal)
        details = {"file": row.file_id, "cases": row.num_cases, "tolerance": row.tolerance}
        return Changed(row, Event("golden_set.put", f"{name}/{golden_set}", details))

    row = await runtime.control_plane.change(principal.tenant_id, origin, put)
    return json_response(golden_set_view(row))


@router.delete("/{golden_set}")
@answers(errors=("golden_set_in_use", *NO_SET))
async def delete_golden_set(
    runtime: CurrentRuntime, principal: Writer, origin: RequestOrigin, name: str, golden_set: str
) -> Response:
    """Remove a golden set. Its file and its evaluations stay."""

    def remove(session: TenantSession) -> Changed[None]:
        golden_sets.remove(session, name, golden_set)
        return Changed(None, Event("golden_set.remove", f"{name}/{golden_set}"))

    await runtime.control_plane.change(principal.tenant_id, origin, remove)
    return Response(status_code=204)
