"""`/admin/servers`: the servers that share this database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.base import utc_now
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.servers import service
from ...platform.servers.models import Server
from ..contract.promises import answers
from ..http.auth import require_operator
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.servers import ServerView
from ..server.runtime import CurrentRuntime
from .pages import Page

router = APIRouter()

Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]


@router.get("/admin/servers")
@answers(PageView[ServerView])
async def list_servers(runtime: CurrentRuntime, operator: Operator, page: Page) -> Response:
    """All servers ever seen, by id, and whether they are alive."""
    rows: Sequence[Server] = await runtime.control_plane.read_all_tenants(
        lambda session: service.list_servers(session, after=page.after, limit=page.num_rows)
    )
    return json_response(page.answer(rows, view=_view, cursor=lambda server: server.id))


def _view(server: Server) -> ServerView:
    return ServerView(
        id=server.id,
        name=server.name,
        version=server.version,
        base_id=server.base_id,
        started_at=server.started_at,
        seen_at=server.seen_at,
        is_live=service.is_live(server, utc_now()),
    )
