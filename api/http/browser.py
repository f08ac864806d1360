"""Browser security of a request: transport, session cookie and origin.

A session cookie is accepted over TLS, or on the server's own machine, and nowhere else. TLS ends in
this server or in a trusted proxy, which reports the scheme that its client used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum

from starlette.requests import Request
from starlette.responses import Response

from ...platform.networks import Network, is_within, parse_address
from ..contract.errors import ApiError
from .hosts import host_name
from .peer_address import peer_address

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-csrf-token"
IDLE_HEADER = "x-loraplex-idle-seconds"
"""The time since the user was last active: pages also send requests by themselves."""
MAX_IDLE_DIGITS = 9
FORWARDED_PROTO = "x-forwarded-proto"
STRICT_TRANSPORT = "max-age=31536000"
"""`Strict-Transport-Security`: browsers use only TLS for a year."""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Transport(Enum):
    """The security of a request's transport."""

    TLS = "tls"
    LOCAL = "local"
    """Plain, and it never left this machine."""
    PLAIN = "plain"
    """Others may read and change the traffic, so sign-in is refused."""

    @property
    def cookie(self) -> str | None:
        """The cookie's name for this transport. `__Host-` binds it to TLS and this host."""
        return {Transport.TLS: "__Host-loraplex", Transport.LOCAL: "loraplex_session"}.get(self)

    @property
    def flow_cookie(self) -> str | None:
        """The same for a sign-in through the identity provider, while it lasts."""
        return {Transport.TLS: "__Host-loraplex-flow", Transport.LOCAL: "loraplex_flow"}.get(self)


def transport_of(request: Request, trusted_proxies: Sequence[Network]) -> Transport:
    """The transport of the request. The client's own claim is ignored."""
    if is_over_tls(request, trusted_proxies):
        return Transport.TLS
    address = peer_address(request, trusted_proxies)
    is_here = request.client is None or (address is not None and address.is_loopback)
    # The host name is checked too, because a foreign page's name may resolve to this machine.
    is_called_so = host_name(request.headers) in _LOCAL_HOSTS
    return Transport.LOCAL if is_here and is_called_so else Transport.PLAIN


def is_over_tls(request: Request, trusted_proxies: Sequence[Network]) -> bool:
    """Whether the client used HTTPS; for a proxy's client, the proxy reports it."""
    said = request.headers.getlist(FORWARDED_PROTO)
    peer = parse_address(request.client.host) if said and request.client else None
    if is_within(peer, trusted_proxies):
        return said[-1].rpartition(",")[2].strip().lower() == "https"
    scheme: str = request.scope["scheme"]
    return scheme == "https"


def session_token(request: Request, transport: Transport) -> str | None:
    """The token in the session cookie; None if there is no valid cookie."""
    return None if transport.cookie is None else request.cookies.get(transport.cookie)


def check_transport(transport: Transport) -> None:
    """Raise ApiError if sign-in is not allowed over this transport."""
    if transport.cookie is None:
        raise ApiError("insecure_transport")


def set_session_cookie(response: Response, transport: Transport, token: str) -> None:
    """Set the session cookie. It ends with the browser, or when the server ends the session."""
    assert transport.cookie is not None, "no session uses this transport"
    _set_cookie(response, transport, transport.cookie, token)


def clear_session_cookie(response: Response, transport: Transport) -> None:
    """Take the session back."""
    if transport.cookie is not None:
        _clear_cookie(response, transport, transport.cookie)


def flow_token(request: Request, transport: Transport) -> str | None:
    """The sign-in flow in the browser's cookie, if there is one."""
    return None if transport.flow_cookie is None else request.cookies.get(transport.flow_cookie)


def set_flow_cookie(
    response: Response, transport: Transport, token: str, *, max_age_seconds: int
) -> None:
    """Bind the sign-in flow to this browser."""
    assert transport.flow_cookie is not None, "nobody signs in over this transport"
    _set_cookie(response, transport, transport.flow_cookie, token, max_age_seconds)


def clear_flow_cookie(response: Response, transport: Transport) -> None:
    """The flow has ended."""
    if transport.flow_cookie is not None:
        _clear_cookie(response, transport, transport.flow_cookie)


def _set_cookie(
    response: Response,
    transport: Transport,
    name: str,
    content: str,
    max_age_seconds: int | None = None,
) -> None:
    response.set_cookie(
        name,
        content,
        max_age=max_age_seconds,
        path="/",
        secure=transport is Transport.TLS,
        httponly=True,
        samesite="strict",
    )


def _clear_cookie(response: Response, transport: Transport, name: str) -> None:
    response.delete_cookie(
        name, path="/", secure=transport is Transport.TLS, httponly=True, samesite="strict"
    )


def check_same_origin(request: Request, transport: Transport, *, is_needed: bool) -> None:
    """Raise ApiError unless a page of this server sent the request.

    Browsers report it in `Sec-Fetch-Site` or `Origin`, which no script can set. `is_needed`: a
    request with neither is refused too.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is None:
        is_ours = not is_needed
    elif site is not None:
        is_ours = site == "same-origin"
    else:
        scheme = "https" if transport is Transport.TLS else "http"
        is_ours = origin == f"{scheme}://{request.headers.get('host', '')}"
    if not is_ours:
        raise ApiError("csrf_failed", "The request comes from a page of another origin.")


def idle_of(request: Request) -> timedelta:
    """The idle time in `IDLE_HEADER`; missing or invalid means zero."""
    sent = request.headers.get(IDLE_HEADER, "")
    is_number = len(sent) <= MAX_IDLE_DIGITS and sent.isascii() and sent.isdigit()
    return timedelta(seconds=int(sent) if is_number else 0)


def base_url(request: Request, transport: Transport) -> str:
    """The URL at which the browser or another client reached this server."""
    scheme = "https" if transport is Transport.TLS else "http"
    return f"{scheme}://{request.headers.get('host', '')}"
