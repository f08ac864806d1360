"""`/admin/settings`: how this server is set up. Read-only: settings are its operator's environment.

A secret is never shown, only whether it is set.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ..auth import require_operator
from ..contract import answers
from ..errors import ApiError
from ..runtime import CurrentRuntime
from ..schemas.adapters import ListView
from ..schemas.server_settings import SettingView

router = APIRouter(prefix="/admin")

Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]


@router.get("/settings")
@answers(ListView[SettingView])
async def list_settings(runtime: CurrentRuntime, operator: Operator) -> Response:
    """Every setting as it is in force, and where it comes from."""
    raise ApiError("internal_error")
