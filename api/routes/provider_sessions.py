"""`/v1/session/oidc`: sign-in at the console through the operator's identity provider.

The provider sends the browser back to a page of the console, which passes the code on by a request
of its own. So every cookie is `SameSite=Strict`, and a failure is an error like any other.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.auth import SessionCaller
from ..http.bodies import json_body
from ..http.browser import (
    Transport,
    base_url,
    clear_flow_cookie,
    flow_token,
    set_flow_cookie,
    transport_of,
)
from ..http.console_files import HOME
from ..http.json_response import json_response
from ..http.peer_address import peer_address
from ..oidc.flow import LIFETIME_SECONDS
from ..oidc.provider_sign_in import ProviderSignIn, Visit
from ..schemas.sessions import (
    CallbackBody,
    FlowBody,
    FlowView,
    IdentityProviderView,
    SessionView,
    SignOutView,
)
from ..server.runtime import CurrentRuntime, Runtime
from .sessions import SESSION_COOKIE, SignInTransport, signed_in_response

CALLBACK = "sign-in/callback"
"""The console's page to which the identity provider sends the browser, below its home."""

open_router = APIRouter(prefix="/v1/session/oidc")
"""For callers that are not signed in yet."""
router = APIRouter(prefix="/v1/session/oidc")


@open_router.get("")
@answers(IdentityProviderView)
async def get_identity_provider(runtime: CurrentRuntime) -> Response:
    """The identity provider through which people can sign in."""
    sign_in = runtime.provider_sign_in
    name = None if sign_in is None else sign_in.provider.config.name
    return json_response(IdentityProviderView(name=name))


@open_router.post("")
@answers(
    FlowView,
    errors=("identity_provider_missing", "identity_provider_unavailable", "overloaded"),
    headers={"set-cookie": "The flow's cookie: `HttpOnly`, `SameSite=Strict`, ten minutes."},
)
async def begin_sign_in(
    request: Request,
    runtime: CurrentRuntime,
    transport: SignInTransport,
    body: Annotated[FlowBody, Depends(json_body(FlowBody))],
) -> Response:
    """Begin a sign-in through the identity provider.

    The response says where the browser goes next. The provider sends it back to the console.
    """
    uri = _redirect_uri(request, transport)
    begun = await _sign_in(runtime).begin(uri, again=body.again)
    response = json_response(FlowView(url=begun.url))
    set_flow_cookie(response, transport, begun.flow.text, max_age_seconds=LIFETIME_SECONDS)
    return response


@open_router.post("/callback")
@answers(
    SessionView,
    errors=(
        *("sign_in_rejected", "identity_not_mapped", "identity_conflict", "account_disabled"),
        *("tenant_suspended", "quota_exceeded", "last_administrator"),
        *("identity_provider_missing", "identity_provider_unavailable", "overloaded"),
    ),
    headers=SESSION_COOKIE,
)
async def finish_sign_in(
    request: Request,
    runtime: CurrentRuntime,
    transport: SignInTransport,
    body: Annotated[CallbackBody, Depends(json_body(CallbackBody))],
) -> Response:
    """Sign in with the code that the identity provider sent by the browser.

    A code and its `state` work once, and only in the browser that began the sign-in. The first
    sign-in of a person adds a user or an operator; each sets the role anew.
    """
    visit = Visit(
        _redirect_uri(request, transport),
        peer_address(request, runtime.settings.trusted_proxies),
        request.state.request_id,
    )
    opened = await _sign_in(runtime).finish(
        flow_token(request, transport), body.state, body.code.get_secret_value(), visit
    )
    response = signed_in_response(runtime, transport, opened.principal, opened.token.text)
    clear_flow_cookie(response, transport)
    return response


@router.get("/sign-out")
@answers(SignOutView)
async def get_sign_out(
    request: Request, runtime: CurrentRuntime, caller: SessionCaller
) -> Response:
    """Where the browser can end its session at the identity provider, if the session was opened
    there."""
    assert caller.signed_in is not None, "the route requires a session"
    sign_in = runtime.provider_sign_in
    if sign_in is None or caller.signed_in.issuer is None:
        return json_response(SignOutView(url=None))
    transport = transport_of(request, runtime.settings.trusted_proxies)
    home = base_url(request, transport) + HOME
    return json_response(SignOutView(url=await sign_in.provider.sign_out_url(home)))


def _sign_in(runtime: Runtime) -> ProviderSignIn:
    if runtime.provider_sign_in is None:
        raise ApiError("identity_provider_missing")
    return runtime.provider_sign_in


def _redirect_uri(request: Request, transport: Transport) -> str:
    """Must be registered at the provider."""
    return f"{base_url(request, transport)}{HOME}{CALLBACK}"
