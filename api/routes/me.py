"""`/v1/me`: the caller's identity and permissions. For every caller."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ..contract.promises import answers
from ..http.auth import Caller
from ..http.json_response import json_response
from ..schemas.me import MeView
from .identity_views import me_view

router = APIRouter(prefix="/v1/me")


@router.get("")
@answers(MeView)
async def get_me(caller: Caller) -> Response:
    """The caller and its permissions.

    The key's owner and tenant, its scopes and restrictions, and its expiry.
    """
    return json_response(me_view(caller))
