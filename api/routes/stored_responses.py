"""`/v1/responses/{response_id}` and `/v1/stored-responses`: stored responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.keys.principal import Principal, Scope
from ...platform.responses import service
from ...platform.responses.models import StoredResponse
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..formats.stored_responses import stored_input
from ..http.auth import require
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.batches import CursorPage
from ..schemas.response_objects import DeletedResponse, StoredResponseView
from ..schemas.response_objects import Response as ResponseObject
from ..server.runtime import CurrentRuntime, Runtime
from .pages import Page
from .parameters import RequestOrigin

router = APIRouter(prefix="/v1")

Caller = Annotated[Principal, Depends(require(Scope.INFER))]
MAX_ITEMS_PAGE = 100


@router.get("/responses/{response_id}")
@answers(ResponseObject, errors=("response_not_found",))
async def get_response(runtime: CurrentRuntime, principal: Caller, response_id: str) -> Response:
    """A stored response, as it was returned."""
    found = await _find(runtime, principal, response_id)
    return Response(found.response, media_type="application/json")


@router.get("/stored-responses")
@answers(PageView[StoredResponseView])
async def list_responses(
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.AUDIT_READ))],
    page: Page,
) -> Response:
    """List the ids of the tenant's stored responses, in the order of the ids.

    OpenAI's API has no such list.
    """
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_responses(session, after=page.after, limit=page.num_rows),
    )
    return json_response(page.answer(rows, view=_view, cursor=lambda row: row.id))


@router.delete("/responses/{response_id}")
@answers(DeletedResponse, errors=("response_not_found",))
async def delete_response(
    runtime: CurrentRuntime, principal: Caller, origin: RequestOrigin, response_id: str
) -> Response:
    """Delete a stored response. Responses that continue it stay, but cannot be continued."""

    def remove(session: TenantSession) -> Changed[None]:
        service.remove(session, response_id, viewer=principal)
        return Changed(None, Event("response.delete", response_id))

    await runtime.control_plane.change(principal.tenant_id, origin, remove)
    return json_response(DeletedResponse(response_id))


@router.get("/responses/{response_id}/input_items")
@answers(CursorPage[dict[str, Any]], errors=("response_not_found",))
async def list_input_items(
    runtime: CurrentRuntime,
    principal: Caller,
    response_id: str,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the items of a stored response's input, the last one first; not those of the responses
    that it continues."""
    items = stored_input(await _find(runtime, principal, response_id))
    if order == "desc":
        items.reverse()
    ids: list[str] = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError("invalid_parameter", "after: is no item of this response", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page, shown = items[start : start + limit], ids[start : start + limit]
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    return json_response(CursorPage(page, start + limit < len(items), first, last))


async def _find(runtime: Runtime, principal: Principal, response_id: str) -> StoredResponse:
    return await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.get_response(session, response_id, viewer=principal),
    )


def _view(response: StoredResponse) -> StoredResponseView:
    return StoredResponseView(
        id=response.id,
        previous_response_id=response.previous_id,
        key_id=response.key_id,
        size_bytes=response.size_bytes,
        created_at=response.created_at,
        expires_at=response.expires_at,
    )
