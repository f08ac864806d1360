"""`/v1/memory` and `/admin/memory`: which adapter lies where, and what KV blocks are used for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ..auth import require, require_operator
from ..contract import answers
from ..errors import ApiError
from ..runtime import CurrentRuntime
from ..schemas.memory import MemoryView

router = APIRouter()

Reader = Annotated[Principal, Depends(require(Scope.ADAPTERS_READ))]
Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]


@router.get("/v1/memory")
@answers(MemoryView)
async def get_memory(runtime: CurrentRuntime, principal: Reader) -> Response:
    """Where the tenant's own adapters lie, on each live server; nothing tells of others."""
    raise ApiError("internal_error")


@router.get("/admin/memory")
@answers(MemoryView)
async def get_platform_memory(runtime: CurrentRuntime, operator: Operator) -> Response:
    """The memory of each live server: this one's as it is now, the others' as they last said."""
    raise ApiError("internal_error")
