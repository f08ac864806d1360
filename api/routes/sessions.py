"""`/v1/session`: sign-in and sign-out at the console, for operators and tenant users.

A session is a cookie that scripts cannot read. Like a key, it gives access to the rest of the API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.accounts.service import IDLE_LIFETIME
from ...platform.accounts.tokens import SESSION_PREFIX, parse_token
from ...platform.audit.event import Changed, Event
from ...platform.errors import SessionEnded
from ...platform.keys.principal import AnyPrincipal, OperatorPrincipal, Principal
from ...platform.sessions import UnitOfWork
from ...platform.version import __version__
from ..contract.promises import answers, terms
from ..control_plane.sign_in import own_tenant_id
from ..http.auth import SessionCaller, origin_of
from ..http.bodies import json_body
from ..http.browser import (
    Transport,
    check_same_origin,
    check_transport,
    clear_session_cookie,
    session_token,
    set_session_cookie,
    transport_of,
)
from ..http.json_response import json_response
from ..http.peer_address import peer_address
from ..schemas.sessions import (
    ConfirmationBody,
    EnrolmentBody,
    PasswordBody,
    ServedView,
    SessionView,
    SignInBody,
)
from ..server.runtime import CurrentRuntime, Runtime

SESSION_COOKIE = {"set-cookie": "The session cookie: `HttpOnly`, `SameSite=Strict`."}

open_router = APIRouter(prefix="/v1/session")
"""For callers that are not signed in yet."""
router = APIRouter(prefix="/v1")


@terms(errors=("insecure_transport", "csrf_failed", "shutting_down", "database_unavailable"))
async def read_transport(request: Request, runtime: CurrentRuntime) -> Transport:
    """The transport of a sign-in. Raises ApiError."""
    transport = transport_of(request, runtime.settings.trusted_proxies)
    check_transport(transport)
    check_same_origin(request, transport, is_needed=False)
    return transport


SignInTransport = Annotated[Transport, Depends(read_transport)]


@open_router.post("")
@answers(
    SessionView,
    errors=("sign_in_failed", "sign_in_locked", "tenant_suspended", "overloaded"),
    headers=SESSION_COOKIE,
)
async def sign_in(
    request: Request,
    runtime: CurrentRuntime,
    transport: SignInTransport,
    body: Annotated[SignInBody, Depends(json_body(SignInBody))],
) -> Response:
    """Sign in with name and password.

    Five failures within fifteen minutes lock the name or the address for fifteen minutes.
    """
    opened = await runtime.sign_in.open(
        body.name,
        body.tenant,
        body.password.get_secret_value(),
        address=peer_address(request, runtime.settings.trusted_proxies),
        request_id=request.state.request_id,
    )
    return signed_in_response(runtime, transport, opened.principal, opened.token.text)


@open_router.post("/enrolment")
@answers(
    SessionView,
    errors=("invitation_ended", "tenant_suspended", "overloaded"),
    headers=SESSION_COOKIE,
)
async def enrol(
    request: Request,
    runtime: CurrentRuntime,
    transport: SignInTransport,
    body: Annotated[EnrolmentBody, Depends(json_body(EnrolmentBody))],
) -> Response:
    """Set a password with an invitation, and sign in.

    This ends the account's other sessions and the invitation.
    """
    opened = await runtime.sign_in.enrol(
        body.token.get_secret_value(),
        body.password.get_secret_value(),
        address=peer_address(request, runtime.settings.trusted_proxies),
        request_id=request.state.request_id,
    )
    return signed_in_response(runtime, transport, opened.principal, opened.token.text)


@router.get("/session")
@answers(SessionView)
async def get_session(request: Request, runtime: CurrentRuntime, caller: SessionCaller) -> Response:
    """The signed-in account and the session's permissions."""
    return json_response(_view(runtime, caller, _own_token(request, runtime)))


@router.post("/session/confirmation")
@answers(SessionView, errors=("sign_in_failed", "sign_in_locked", "overloaded"))
async def confirm_session(
    request: Request,
    runtime: CurrentRuntime,
    caller: SessionCaller,
    body: Annotated[ConfirmationBody, Depends(json_body(ConfirmationBody))],
) -> Response:
    """Confirm the password again.

    For ten minutes the session can create keys and invitations, change roles, suspend tenants and
    delete.
    """
    token, origin = _own_token(request, runtime), origin_of(request, caller)
    password = body.password.get_secret_value()
    await runtime.sign_in.confirm(caller, token, password, origin)
    confirmed = await runtime.control_plane.authenticate_session(
        token, request.headers.get("x-loraplex-tenant")
    )
    return json_response(_view(runtime, confirmed, token))


@router.post("/session/password")
@answers(errors=("sign_in_failed", "sign_in_locked", "overloaded"))
async def change_password(
    request: Request,
    runtime: CurrentRuntime,
    caller: SessionCaller,
    body: Annotated[PasswordBody, Depends(json_body(PasswordBody))],
) -> Response:
    """Change the password; this ends the account's other sessions and an open invitation."""
    await runtime.sign_in.change_password(
        caller,
        _own_token(request, runtime),
        body.current.get_secret_value(),
        body.new.get_secret_value(),
        origin_of(request, caller),
    )
    return Response(status_code=204)


@router.delete("/session")
@answers()
async def sign_out(request: Request, runtime: CurrentRuntime, caller: SessionCaller) -> Response:
    """Sign out of this session."""
    accounts, token = runtime.control_plane.accounts, _own_token(request, runtime)

    def end(session: UnitOfWork) -> Changed[None]:
        accounts.end(session, token)
        return Changed(None, Event("session.end", _account_id(caller)))

    return await _end(request, runtime, caller, end)


@router.delete("/sessions")
@answers()
async def sign_out_everywhere(
    request: Request, runtime: CurrentRuntime, caller: SessionCaller
) -> Response:
    """Sign out of all sessions."""
    accounts, account_id = runtime.control_plane.accounts, _account_id(caller)

    def end(session: UnitOfWork) -> Changed[None]:
        number = accounts.end_all(session, account_id)
        return Changed(None, Event("session.end", account_id, {"sessions": number}))

    return await _end(request, runtime, caller, end)


async def _end(
    request: Request,
    runtime: Runtime,
    caller: AnyPrincipal,
    end: Callable[[UnitOfWork], Changed[None]],
) -> Response:
    origin = origin_of(request, caller)
    await runtime.control_plane.change_own(own_tenant_id(caller), origin, end)
    response = Response(status_code=204)
    clear_session_cookie(response, transport_of(request, runtime.settings.trusted_proxies))
    return response


def signed_in_response(
    runtime: Runtime, transport: Transport, caller: AnyPrincipal, token: str
) -> Response:
    """The response with a new session's view and cookie."""
    response = json_response(_view(runtime, caller, token))
    set_session_cookie(response, transport, token)
    return response


def _own_token(request: Request, runtime: Runtime) -> str:
    """The token in the caller's cookie. It was verified already: other callers do not get here."""
    token = session_token(request, transport_of(request, runtime.settings.trusted_proxies))
    if token is None:
        raise SessionEnded
    return token


def _account_id(caller: AnyPrincipal) -> str:
    if caller.signed_in is None:
        raise SessionEnded
    return caller.signed_in.account_id


def _view(runtime: Runtime, caller: AnyPrincipal, text: str) -> SessionView:
    token, signed_in = parse_token(text, SESSION_PREFIX), caller.signed_in
    if token is None or signed_in is None:
        raise SessionEnded
    is_operator = isinstance(caller, OperatorPrincipal) or caller.operator_role is not None
    scopes = caller.role.scopes if isinstance(caller, OperatorPrincipal) else caller.scopes
    return SessionView(
        kind="operator" if is_operator else "user",
        name=caller.actor.name,
        tenant=caller.tenant_slug if isinstance(caller, Principal) else None,
        role=signed_in.role,
        scopes=sorted(scopes),
        csrf_token=token.csrf_token,
        expires_at=signed_in.expires_at,
        idle_seconds=int(IDLE_LIFETIME.total_seconds()),
        confirmed_until=signed_in.confirmed_until,
        signed_in_with="password" if signed_in.issuer is None else "provider",
        server=ServedView(
            version=__version__,
            base_model=runtime.inference.served_model_name,
            grammars=runtime.engine.info.serves_grammars,
            tuning=runtime.tuning is not None,
        ),
    )
