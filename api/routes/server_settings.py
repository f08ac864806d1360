"""`/admin/settings`: the server's settings. Read-only, because they come from its environment.

A secret is never shown, only whether it is set.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ..contract.promises import answers
from ..http.auth import require_operator
from ..http.json_response import json_response
from ..schemas.adapters import ListView
from ..schemas.server_settings import SettingView
from ..server.runtime import CurrentRuntime
from ..server_settings import list_settings_in_force

router = APIRouter(prefix="/admin")

Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]


@router.get("/settings")
@answers(ListView[SettingView])
async def list_settings(runtime: CurrentRuntime, operator: Operator) -> Response:
    """Every setting with its effective value and its source."""
    found = list_settings_in_force(runtime.settings, runtime.engine_config)
    return json_response(ListView([SettingView(*setting) for setting in found]))
