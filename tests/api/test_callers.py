"""Who a request is taken for, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from loraplex.api.contract.errors import ApiError
from loraplex.api.http.auth import (
    Confirmation,
    authenticate,
    bearer_token,
    check_confirmation,
    check_metrics_access,
    credential_id,
    origin_of,
    require,
    require_operator,
    require_session,
)
from loraplex.api.http.browser import (
    Transport,
    base_url,
    check_same_origin,
    check_transport,
    clear_session_cookie,
    idle_of,
    session_token,
    set_session_cookie,
    transport_of,
)
from loraplex.platform.accounts.tokens import SESSION_PREFIX, make_token
from loraplex.platform.audit.event import Origin
from loraplex.platform.base import utc_now
from loraplex.platform.errors import SessionEnded
from loraplex.platform.keys import token as keys
from loraplex.platform.keys.principal import (
    AnyPrincipal,
    OperatorPrincipal,
    OperatorRole,
    Scope,
    SignedIn,
)
from loraplex.platform.networks import parse_networks

SESSION = make_token(SESSION_PREFIX)
KEY = keys.make_token()
COOKIE = {"host": "localhost", "cookie": f"loraplex_session={SESSION.text}"}
ROOT = OperatorPrincipal("id", "root", OperatorRole.ADMIN)
VIEWER = OperatorPrincipal("id", "eve", OperatorRole.VIEWER)
PROXIES = parse_networks(["127.0.0.1/32"])


class Asked:
    """A control plane that takes everybody for one caller, and what it was asked."""

    def __init__(self, caller: AnyPrincipal = ROOT) -> None:
        self.caller = caller
        self.calls: list[tuple[object, ...]] = []

    async def authenticate(self, *asked: object) -> AnyPrincipal:
        self.calls.append(("key", *asked))
        return self.caller

    async def authenticate_session(self, *asked: object) -> AnyPrincipal:
        self.calls.append(("session", *asked))
        return self.caller


def request(
    headers: dict[str, str],
    peer: str | None = "127.0.0.1",
    runtime: Any = None,
    method: str = "GET",
    scheme: str = "http",
) -> Request:
    """Without a peer, by a Unix socket."""
    return Request(
        {
            "type": "http",
            "path": "/v1/models",
            "method": method,
            "scheme": scheme,
            "headers": [(name.encode(), text.encode("latin-1")) for name, text in headers.items()],
            "client": None if peer is None else (peer, 1234),
            "app": SimpleNamespace(state=SimpleNamespace(runtime=runtime)),
        }
    )


def runtime_of(asked: Asked) -> SimpleNamespace:
    return SimpleNamespace(control_plane=asked, settings=SimpleNamespace(trusted_proxies=()))


def calls(headers: dict[str, str], method: str = "GET") -> list[tuple[object, ...]]:
    """What is asked of the control plane about this request."""
    asked = Asked()
    sent = request(headers, runtime=runtime_of(asked), method=method)
    assert asyncio.run(authenticate(sent)) is ROOT
    return asked.calls


def let_in(
    check: Callable[[AnyPrincipal], Awaitable[AnyPrincipal]], caller: AnyPrincipal
) -> AnyPrincipal:
    async def run() -> AnyPrincipal:
        return await check(caller)

    return asyncio.run(run())


def refusal_of(sent: Request) -> str:
    with pytest.raises(ApiError) as caught:
        asyncio.run(authenticate(sent))
    return caught.value.code


def test_a_session_is_asked_for_with_its_tenant_and_how_long_its_person_was_idle() -> None:
    sent = {**COOKIE, "x-loraplex-tenant": "acme", "x-loraplex-idle-seconds": "420"}
    assert calls(sent) == [("session", SESSION.text, "acme", timedelta(minutes=7))]


def test_a_key_goes_before_a_session() -> None:
    sent = {**COOKIE, "authorization": f"Bearer {KEY.text}"}
    assert calls(sent) == [("key", KEY.text, None)]
    assert credential_id(request(sent), ()) == KEY.key_id
    assert credential_id(request(COOKIE), ()) == SESSION.hash


def test_a_session_changes_something_from_its_own_pages_alone() -> None:
    asked = Asked()
    own = {**COOKIE, "sec-fetch-site": "same-origin", "x-csrf-token": SESSION.csrf_token}
    assert len(calls(own, "POST")) == 1
    for wrong in ({"x-csrf-token": "other"}, {"x-csrf-token": ""}, {"sec-fetch-site": "none"}):
        sent = request({**own, **wrong}, runtime=runtime_of(asked), method="POST")
        assert refusal_of(sent) == "csrf_failed"
    with_token_alone = {**COOKIE, "x-csrf-token": SESSION.csrf_token}
    sent = request(with_token_alone, runtime=runtime_of(asked), method="POST")
    assert refusal_of(sent) == "csrf_failed"
    assert asked.calls == []


def test_a_cookie_that_is_no_session_is_one_that_has_ended() -> None:
    asked = Asked()
    sent = request({**COOKIE, "cookie": "loraplex_session=x"}, runtime=runtime_of(asked))
    with pytest.raises(SessionEnded):
        asyncio.run(authenticate(sent))
    assert asked.calls == []


@pytest.mark.parametrize(("peer", "is_allowed"), [("10.1.2.3", True), ("11.1.2.3", False)])
def test_a_key_is_used_from_its_networks_and_the_request_says_whose_it_is(
    peer: str, is_allowed: bool
) -> None:
    operator = replace(ROOT, networks=parse_networks(["10.0.0.0/8"]))
    key = replace(operator.within("acme-id", "acme", 1.0), key_id="AbCdEf012345")
    headers = {"authorization": f"Bearer {KEY.text}"}
    sent = request(headers, peer, runtime_of(Asked(key)))
    if is_allowed:
        assert asyncio.run(authenticate(sent)) is key
        state = (sent.state.caller, sent.state.tenant_id, sent.state.key_id)
        assert state == (key, "acme-id", "AbCdEf012345")
    else:
        assert refusal_of(sent) == "address_not_allowed"
    sent.state.request_id = "req-1"
    assert origin_of(sent, key) == Origin(ROOT.actor, "req-1", peer)


def test_an_origin_may_have_no_address() -> None:
    sent = request({}, None)
    sent.state.address, sent.state.request_id = None, "req-1"
    assert origin_of(sent, ROOT) == Origin(ROOT.actor, "req-1", None)


@pytest.mark.parametrize(
    ("sent", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc\t", "abc"),
        ("Bearer a b", "a b"),
    ],
)
def test_reads_a_bearer_token(sent: str, token: str) -> None:
    assert bearer_token(request({"authorization": sent})) == token


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (None, "missing_api_key"),
        ("abc", "missing_api_key"),
        ("Bearer", "invalid_api_key"),
        ("Basic abc", "invalid_api_key"),
    ],
)
def test_says_whether_a_bearer_token_is_missing_or_wrong(sent: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        bearer_token(request({} if sent is None else {"authorization": sent}))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("caller", "scope", "code"),
    [
        (ROOT, Scope.INFER, "tenant_required"),
        (ROOT.within("acme-id", "acme", 1.0), Scope.INFER, None),
        (VIEWER.within("acme-id", "acme", 1.0), Scope.INFER, "insufficient_scope"),
        (VIEWER.within("acme-id", "acme", 1.0), Scope.USAGE_READ, None),
    ],
)
def test_a_scope_is_required_within_a_tenant(
    caller: AnyPrincipal, scope: Scope, code: str | None
) -> None:
    if code is None:
        assert let_in(require(scope), caller) is caller
        return
    with pytest.raises(ApiError) as caught:
        let_in(require(scope), caller)
    assert caught.value.code == code


def test_an_operator_is_required_outside_of_tenants_and_with_the_role() -> None:
    check = require_operator(OperatorRole.ADMIN)
    assert let_in(check, ROOT) is ROOT
    for caller in (VIEWER, ROOT.within("acme-id", "acme", 1.0)):
        with pytest.raises(ApiError) as caught:
            let_in(check, caller)
        assert caught.value.code == "insufficient_scope"


def test_a_session_and_its_confirmation_are_required_of_sessions() -> None:
    def signed_in(confirmed_for: timedelta | None) -> OperatorPrincipal:
        now = utc_now()
        until = None if confirmed_for is None else now + confirmed_for
        return replace(ROOT, signed_in=SignedIn("id", "admin", now, until))

    confirmed = signed_in(timedelta(minutes=1))
    assert let_in(require_session, confirmed) is confirmed
    with pytest.raises(ApiError) as caught:
        let_in(require_session, ROOT)
    assert caught.value.code == "session_required"
    Confirmation(ROOT).check()
    Confirmation(confirmed).check()
    for unconfirmed in (signed_in(None), signed_in(timedelta(seconds=-1))):
        with pytest.raises(ApiError) as caught:
            asyncio.run(check_confirmation(Confirmation(unconfirmed)))
        assert caught.value.code == "confirmation_required"


FORWARDED = {"host": "console.example", "x-forwarded-for": "192.0.2.7"}


@pytest.mark.parametrize(
    ("sent", "transport"),
    [
        (request({"host": "console.example"}, "192.0.2.7", scheme="https"), Transport.TLS),
        (request({"host": "localhost:8000"}), Transport.LOCAL),
        (request({"host": "127.0.0.1"}), Transport.LOCAL),
        (request({"host": "[::1]:8000"}, "::1"), Transport.LOCAL),
        (request({"host": "localhost"}, None), Transport.LOCAL),
        (request({"host": "console.example"}), Transport.PLAIN),
        (request({}), Transport.PLAIN),
        (request({"host": "localhost"}, "192.0.2.7"), Transport.PLAIN),
        (request({"host": "localhost"}, "no address"), Transport.PLAIN),
        (request({**FORWARDED, "x-forwarded-proto": "https"}), Transport.TLS),
        (request({**FORWARDED, "x-forwarded-proto": "http, HTTPS"}), Transport.TLS),
        (request({**FORWARDED, "x-forwarded-proto": "https,http"}), Transport.PLAIN),
        (request({**FORWARDED, "x-forwarded-proto": "http"}, scheme="https"), Transport.PLAIN),
        (request({**FORWARDED, "x-forwarded-proto": "https"}, "192.0.2.8"), Transport.PLAIN),
        (request(FORWARDED, scheme="https"), Transport.TLS),
        (request({**FORWARDED, "host": "localhost"}), Transport.PLAIN),
    ],
)
def test_a_transport_is_what_the_server_or_its_proxy_says(
    sent: Request, transport: Transport
) -> None:
    assert transport_of(sent, PROXIES) is transport


def test_there_is_no_session_over_a_plain_transport() -> None:
    cookies = request({"cookie": "loraplex_session=a; __Host-loraplex=b"})
    tokens = [session_token(cookies, transport) for transport in Transport]
    assert tokens == ["b", "a", None]
    response = Response()
    clear_session_cookie(response, Transport.PLAIN)
    assert "set-cookie" not in response.headers
    check_transport(Transport.TLS)
    check_transport(Transport.LOCAL)
    with pytest.raises(ApiError) as caught:
        check_transport(Transport.PLAIN)
    assert caught.value.code == "insecure_transport"


def test_the_servers_url_is_as_its_caller_calls_it() -> None:
    sent = request({"host": "console.example:8443"})
    assert base_url(sent, Transport.TLS) == "https://console.example:8443"
    assert base_url(sent, Transport.LOCAL) == "http://console.example:8443"
    assert base_url(request({}), Transport.LOCAL) == "http://"


@pytest.mark.parametrize(
    ("headers", "transport", "is_ours"),
    [
        ({"sec-fetch-site": "same-origin"}, Transport.TLS, True),
        ({"sec-fetch-site": "same-site"}, Transport.TLS, False),
        ({"sec-fetch-site": "cross-site", "origin": "https://a.example"}, Transport.TLS, False),
        ({"origin": "https://a.example"}, Transport.TLS, True),
        ({"origin": "http://a.example"}, Transport.TLS, False),
        ({"origin": "http://a.example"}, Transport.LOCAL, True),
        ({"origin": "https://b.example"}, Transport.TLS, False),
        ({"origin": "null"}, Transport.TLS, False),
    ],
)
def test_a_page_of_another_origin_is_refused(
    headers: dict[str, str], transport: Transport, is_ours: bool
) -> None:
    sent = request({"host": "a.example", **headers})
    for is_needed in (True, False):
        if is_ours:
            check_same_origin(sent, transport, is_needed=is_needed)
        else:
            with pytest.raises(ApiError) as caught:
                check_same_origin(sent, transport, is_needed=is_needed)
            assert caught.value.code == "csrf_failed"


def test_who_names_no_origin_is_no_page_and_refused_where_one_is_needed() -> None:
    sent = request({"host": "a.example"})
    check_same_origin(sent, Transport.TLS, is_needed=False)
    with pytest.raises(ApiError):
        check_same_origin(sent, Transport.TLS, is_needed=True)


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [("90", 90), ("999999999", 999_999_999), ("1" * 10, 0), ("-1", 0), ("1.5", 0), ("²", 0)],
)
def test_an_idle_time_that_is_none_is_no_time(sent: str, seconds: int) -> None:
    assert idle_of(request({"x-loraplex-idle-seconds": sent})) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("transport", "name", "more"),
    [(Transport.TLS, "__Host-loraplex", {"Secure"}), (Transport.LOCAL, "loraplex_session", set())],
)
def test_a_cookie_is_for_this_server_alone_and_for_no_script(
    transport: Transport, name: str, more: set[str]
) -> None:
    response = Response()
    set_session_cookie(response, transport, SESSION.text)
    assert response.headers["set-cookie"].startswith(f"{name}={SESSION.text}; ")
    assert attributes(response) == {"HttpOnly", "Path=/", "SameSite=strict", *more}


@pytest.mark.parametrize("transport", [Transport.TLS, Transport.LOCAL])
def test_a_cookie_is_taken_back_as_it_was_given(transport: Transport) -> None:
    """Browsers refuse a `__Host-` cookie, its end too, without its attributes."""
    given, taken = Response(), Response()
    set_session_cookie(given, transport, SESSION.text)
    clear_session_cookie(taken, transport)
    end = {"expires", "Max-Age"}
    assert {name for name in attributes(taken) if name.partition("=")[0] not in end} == (
        attributes(given)
    )


def attributes(response: Response) -> set[str]:
    return set(response.headers["set-cookie"].split("; ")[1:])


@pytest.mark.parametrize(
    ("token", "sent", "peer", "code"),
    [
        (None, None, "127.0.0.1", None),
        (None, None, None, None),
        (None, None, "192.0.2.7", "missing_api_key"),
        (None, None, "no address", "missing_api_key"),
        ("secret", "secret", "192.0.2.7", None),
        ("secret", "other", "127.0.0.1", "invalid_api_key"),
        ("secret", None, "127.0.0.1", "missing_api_key"),
    ],
)
def test_metrics_are_for_the_token_or_without_one_for_this_machine(
    token: str | None, sent: str | None, peer: str | None, code: str | None
) -> None:
    asked = request({} if sent is None else {"authorization": f"Bearer {sent}"}, peer)
    if code is None:
        check_metrics_access(asked, token, ())
        return
    with pytest.raises(ApiError) as caught:
        check_metrics_access(asked, token, ())
    assert caught.value.code == code


@pytest.mark.parametrize("token", [None, "secret"])
def test_metrics_need_no_token_in_the_operators_networks(token: str | None) -> None:
    networks = (ip_network("192.0.2.0/24"),)
    check_metrics_access(request({}, "192.0.2.7"), token, (), networks)
    for peer in ("192.0.3.7", "no address"):
        with pytest.raises(ApiError) as caught:
            check_metrics_access(request({}, peer), token, (), networks)
        assert caught.value.code == "missing_api_key"
