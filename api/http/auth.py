"""Authentication: a dependency that `app.py` adds to every route that is not listed as open.

It reads headers only: FastAPI runs it before the dependencies that read a body.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from ...platform.accounts.tokens import SESSION_PREFIX, AccountToken, parse_token
from ...platform.audit.event import Origin
from ...platform.base import utc_now
from ...platform.errors import SessionEnded
from ...platform.keys.principal import (
    AnyPrincipal,
    OperatorPrincipal,
    OperatorRole,
    Principal,
    Scope,
)
from ...platform.keys.token import parse_token as parse_key
from ...platform.networks import Network, is_within
from ..contract.errors import ApiError
from ..contract.message_errors import is_messages_path
from ..contract.promises import terms
from ..server.runtime import Runtime
from .batch_lines import line_of
from .browser import (
    CSRF_HEADER,
    SAFE_METHODS,
    check_same_origin,
    idle_of,
    session_token,
    transport_of,
)
from .peer_address import peer_address

MESSAGES_KEY_HEADER = "x-api-key"
"""The header in which clients of Anthropic's API send the key, below `/v1/messages`."""
TENANT_HEADER = "x-loraplex-tenant"
"""The header with which an operator names a tenant."""


@terms(
    errors=(
        "missing_api_key",
        "invalid_api_key",
        "session_ended",
        "csrf_failed",
        "address_not_allowed",
        "tenant_suspended",
        "tenant_not_found",
        "database_unavailable",
        "shutting_down",
    )
)
async def authenticate(request: Request) -> AnyPrincipal:
    """The caller: a tenant's key, an operator, or a signed-in user.

    An operator acts in the tenant that it names, or in none. A key takes precedence over a session.
    Raises ApiError or a PlatformError.
    """
    runtime: Runtime = request.app.state.runtime
    address = peer_address(request, runtime.settings.trusted_proxies)
    request.state.address = address
    caller = request.state.caller = await _caller(request, runtime)
    if caller.networks is not None and not is_within(address, caller.networks):
        raise ApiError("address_not_allowed")
    if isinstance(caller, Principal):
        request.state.tenant_id = caller.tenant_id
        request.state.key_id = caller.key_id
    return caller


Caller = Annotated[AnyPrincipal, Depends(authenticate)]


async def _caller(request: Request, runtime: Runtime) -> AnyPrincipal:
    if line := line_of(request):
        return await runtime.control_plane.authenticate_key_id(line.key_id)
    tenant = request.headers.get(TENANT_HEADER)
    cookie = _cookie(request, runtime.settings.trusted_proxies)
    if cookie is None:
        return await runtime.control_plane.authenticate(_api_key(request), tenant)
    token = parse_token(cookie, SESSION_PREFIX)
    if token is None:
        raise SessionEnded
    if request.method not in SAFE_METHODS:
        transport = transport_of(request, runtime.settings.trusted_proxies)
        check_same_origin(request, transport, is_needed=True)
        sent = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(sent.encode(), token.csrf_token.encode()):
            raise ApiError("csrf_failed")
    return await runtime.control_plane.authenticate_session(cookie, tenant, idle_of(request))


def credential_id(request: Request, trusted_proxies: Sequence[Network]) -> str:
    """The id of the key or session of an authenticated request; not a secret."""
    cookie = _cookie(request, trusted_proxies)
    if cookie is None:
        return parse_key(_api_key(request)).key_id
    return AccountToken(cookie).hash


def _cookie(request: Request, trusted_proxies: Sequence[Network]) -> str | None:
    """The session cookie, if the request uses it: a key takes precedence."""
    if "authorization" in request.headers or _messages_key(request) is not None:
        return None
    return session_token(request, transport_of(request, trusted_proxies))


def _api_key(request: Request) -> str:
    """The key of the request: the bearer token, or where Anthropic's clients call, their header.
    Raises ApiError."""
    key = _messages_key(request)
    return bearer_token(request) if key is None or "authorization" in request.headers else key


def _messages_key(request: Request) -> str | None:
    """The value of Anthropic's header, on the paths that its clients call."""
    is_theirs = is_messages_path(request.scope["path"])
    return (
        request.headers.get(MESSAGES_KEY_HEADER) if is_theirs else None
    )  # at most one: see `head`


@terms(errors=("session_required",), session=True)
async def require_session(caller: Caller) -> AnyPrincipal:
    """A dependency that yields the caller if it is signed in."""
    if caller.signed_in is None:
        raise ApiError("session_required")
    return caller


SessionCaller = Annotated[AnyPrincipal, Depends(require_session)]


class Confirmation:
    """Whether the caller may now perform an action for which a session needs the password again."""

    def __init__(self, caller: AnyPrincipal) -> None:
        self._signed_in = caller.signed_in

    def check(self) -> None:
        """Raises ApiError. Keys need none."""
        if self._signed_in is not None and not self._signed_in.is_confirmed(utc_now()):
            raise ApiError("confirmation_required")


@terms(errors=("confirmation_required",))
async def read_confirmation(caller: Caller) -> Confirmation:
    """A dependency for routes that need the confirmation for some of their actions."""
    return Confirmation(caller)


async def check_confirmation(
    confirmation: Annotated[Confirmation, Depends(read_confirmation)],
) -> None:
    confirmation.check()


Confirmed = Annotated[None, Depends(check_confirmation)]
"""For routes that always need the confirmation. It is checked after the permissions, so a caller
that will be refused is not asked for the password."""


def require(scope: Scope) -> Callable[[Caller], Awaitable[Principal]]:
    """A dependency that yields the caller within a tenant if it may do this there."""

    @terms(errors=("tenant_required", "insufficient_scope"), scope=scope.value)
    async def check_scope(caller: Caller) -> Principal:
        if isinstance(caller, OperatorPrincipal):
            raise ApiError("tenant_required")
        if not caller.can(scope):
            raise ApiError("insufficient_scope", f"This requires a key with the scope `{scope}`.")
        return caller

    return check_scope


def require_operator(
    *roles: OperatorRole,
) -> Callable[[Caller], Awaitable[OperatorPrincipal]]:
    """A dependency that returns the calling operator, if it has one of these roles."""

    @terms(errors=("insufficient_scope",), roles=tuple(role.value for role in roles))
    async def check_role(caller: Caller) -> OperatorPrincipal:
        if not isinstance(caller, OperatorPrincipal):
            raise ApiError("insufficient_scope", "This is for operators only, without a tenant.")
        if caller.role not in roles:
            raise ApiError("insufficient_scope", "Your role does not allow this.")
        return caller

    return check_role


def origin_of(request: Request, caller: AnyPrincipal) -> Origin:
    """The origin of the request, for the audit log."""
    address = request.state.address
    return Origin(
        caller.actor,
        request.state.request_id,
        None if address is None else str(address),
        getattr(request.state, "guard", None),
    )


def check_metrics_access(
    request: Request,
    token: str | None,
    trusted_proxies: Sequence[Network],
    networks: Sequence[Network] = (),
) -> None:
    """Metrics show all tenants: the operator's token opens them, or, without one, this machine.
    `networks` need no token.

    Raises ApiError.
    """
    if is_within(peer_address(request, trusted_proxies), networks):
        return
    if token is None:
        if not _is_local(request, trusted_proxies):
            raise ApiError(
                "missing_api_key", "Set a metrics token to allow access from other machines."
            )
        return
    if not hmac.compare_digest(bearer_token(request).encode(), token.encode()):
        raise ApiError("invalid_api_key")


def bearer_token(request: Request) -> str:
    """The one bearer token of the request. Raises ApiError."""
    sent = request.headers.get("authorization")  # exactly one: see `head`
    if sent is None:
        raise ApiError("missing_api_key")
    scheme, _, token = sent.partition(" ")
    if not token and scheme.lower() != "bearer":
        raise ApiError("missing_api_key", "Send the key as `Authorization: Bearer <key>`.")
    if scheme.lower() != "bearer" or not token:
        raise ApiError("invalid_api_key")
    return token.strip(" \t")


def _is_local(request: Request, trusted_proxies: Sequence[Network]) -> bool:
    if request.client is None:  # a Unix socket has no address and is always local
        return True
    address = peer_address(request, trusted_proxies)
    return address is not None and address.is_loopback
