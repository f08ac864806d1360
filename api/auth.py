"""Who calls. A dependency of the root router, so that a route is closed unless it is listed open.

It reads headers only: FastAPI runs it before the dependencies that read a body.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from ..platform.keys.principal import Principal, Scope
from .errors import ApiError
from .runtime import Runtime, current_runtime


async def authenticate(
    request: Request, runtime: Annotated[Runtime, Depends(current_runtime)]
) -> Principal:
    """The principal of the request's API key. Raises ApiError or a PlatformError."""
    principal = await runtime.control_plane.authenticate(bearer_token(request))
    request.state.tenant_id = principal.tenant_id
    return principal


def require(scope: Scope) -> Callable[[Principal], Awaitable[Principal]]:
    """A dependency that yields the principal if its key carries `scope`."""

    async def check_scope(principal: Annotated[Principal, Depends(authenticate)]) -> Principal:
        if not principal.can(scope):
            raise ApiError("insufficient_scope", f"This needs a key with the scope `{scope}`.")
        return principal

    return check_scope


def check_metrics_access(request: Request, token: str | None) -> None:
    """Metrics show all tenants: the operator's token opens them, or, without one, this machine.

    Raises ApiError.
    """
    if token is None:
        if not _is_local(request):
            raise ApiError("missing_api_key", "Set a metrics token to read them from elsewhere.")
        return
    if not hmac.compare_digest(bearer_token(request).encode(), token.encode()):
        raise ApiError("invalid_api_key")


def bearer_token(request: Request) -> str:
    """The one bearer token of the request. Raises ApiError."""
    sent = request.headers.getlist("authorization")
    if not sent:
        raise ApiError("missing_api_key")
    scheme, _, token = sent[0].partition(" ")
    if len(sent) == 1 and not token and scheme.lower() != "bearer":
        raise ApiError("missing_api_key", "Send the key as `Authorization: Bearer <key>`.")
    if len(sent) > 1 or scheme.lower() != "bearer" or not token:
        raise ApiError("invalid_api_key")
    return token.strip()


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:  # a Unix socket has no address: whoever reaches it is here
        return True
