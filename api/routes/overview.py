"""`/v1/overview` and `/admin/overview`: how much, how fast and how full, over time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ..auth import require, require_operator
from ..contract import answers
from ..errors import ApiError
from ..runtime import CurrentRuntime
from ..schemas.overview import OverviewView, PlatformOverviewView, RangeName

router = APIRouter()

Reader = Annotated[Principal, Depends(require(Scope.USAGE_READ))]
Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]
Range = Annotated[RangeName, Query(alias="range", description="How far it goes back.")]


@router.get("/v1/overview")
@answers(OverviewView)
async def get_overview(
    runtime: CurrentRuntime, principal: Reader, range_name: Range = "1h"
) -> Response:
    """The tenant's own figures over time, of all servers together."""
    raise ApiError("internal_error")


@router.get("/admin/overview")
@answers(PlatformOverviewView)
async def get_platform_overview(
    runtime: CurrentRuntime, operator: Operator, range_name: Range = "1h"
) -> Response:
    """Everybody's figures over time, of all servers together, and each tenant's part in them."""
    raise ApiError("internal_error")
