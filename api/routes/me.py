"""`/v1/me`: who calls, and what it may do. For every caller."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ..auth import Caller
from ..json_response import json_response
from .identity_views import me_view

router = APIRouter(prefix="/v1/me")


@router.get("")
async def get_me(caller: Caller) -> Response:
    """Whose key it is, in which tenant, its scopes and restrictions, and when it ends."""
    return json_response(me_view(caller))
