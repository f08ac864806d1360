"""`/v1/keys/{key_id}/limits`, `/v1/users/{user_id}/limits`: limits besides those of the tenant."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.quotas.caller_limits import (
    CallerLimitSet,
    get_caller_limits,
    set_caller_limits,
)
from ...platform.sessions import TenantSession
from ..contract.promises import answers
from ..http.auth import origin_of
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.money import CallerLimitsBody, CallerLimitsView
from ..server.runtime import CurrentRuntime, Runtime
from .callers import Caller, KeyInPath, UserInPath

router = APIRouter(prefix="/v1")

Body = Annotated[CallerLimitsBody, Depends(json_body(CallerLimitsBody))]


@router.get("/keys/{key_id}/limits")
@answers(CallerLimitsView, errors=("key_not_found",))
async def get_limits_of_key(runtime: CurrentRuntime, caller: KeyInPath) -> Response:
    """The key's limits."""
    return await _get(runtime, caller)


@router.put("/keys/{key_id}/limits")
@answers(CallerLimitsView, errors=("key_not_found",))
async def set_limits_of_key(
    request: Request, runtime: CurrentRuntime, caller: KeyInPath, body: Body
) -> Response:
    """Replace the key's limits; a key that is rotated passes them on."""
    return await _set(request, runtime, caller, body)


@router.get("/users/{user_id}/limits")
@answers(CallerLimitsView, errors=("user_not_found",))
async def get_limits_of_user(runtime: CurrentRuntime, caller: UserInPath) -> Response:
    """The user's limits."""
    return await _get(runtime, caller)


@router.put("/users/{user_id}/limits")
@answers(CallerLimitsView, errors=("user_not_found",))
async def set_limits_of_user(
    request: Request, runtime: CurrentRuntime, caller: UserInPath, body: Body
) -> Response:
    """Replace the user's limits, which hold over all the user's keys and sessions together."""
    return await _set(request, runtime, caller, body)


async def _get(runtime: Runtime, caller: Caller) -> Response:
    def read(session: TenantSession) -> CallerLimitSet:
        caller.check(session)
        return get_caller_limits(session, caller.holder)

    return _answer(await runtime.control_plane.read(caller.manager.tenant_id, read))


async def _set(
    request: Request, runtime: Runtime, caller: Caller, body: CallerLimitsBody
) -> Response:
    limits = CallerLimitSet(**body.model_dump(include=set(CallerLimitsBody.model_fields)))

    def change(session: TenantSession) -> Changed[CallerLimitSet]:
        caller.check(session)
        set_caller_limits(session, caller.holder, limits)
        return Changed(limits, Event("limits.set", caller.holder, asdict(limits)))

    origin = origin_of(request, caller.manager)
    return _answer(await runtime.control_plane.change(caller.manager.tenant_id, origin, change))


def _answer(limits: CallerLimitSet) -> Response:
    return json_response(CallerLimitsView(**asdict(limits)))
