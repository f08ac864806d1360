"""Who a request is taken for, without a server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from loraplex.api.contract.errors import ApiError
from loraplex.api.http.auth import authenticate, check_metrics_access, credential_id
from loraplex.api.http.browser import (
    Transport,
    clear_session_cookie,
    idle_of,
    set_session_cookie,
)
from loraplex.platform.accounts.tokens import SESSION_PREFIX, make_token
from loraplex.platform.keys import token as keys
from loraplex.platform.keys.principal import OperatorPrincipal, OperatorRole

SESSION = make_token(SESSION_PREFIX)
KEY = keys.make_token()
COOKIE = {"host": "localhost", "cookie": f"loraplex_session={SESSION.text}"}
ROOT = OperatorPrincipal("id", "root", OperatorRole.ADMIN)


class Asked:
    """A control plane that knows everybody, and what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    async def authenticate(self, *asked: object) -> OperatorPrincipal:
        self.calls.append(("key", *asked))
        return ROOT

    async def authenticate_session(self, *asked: object) -> OperatorPrincipal:
        self.calls.append(("session", *asked))
        return ROOT


def request(headers: dict[str, str], peer: str = "127.0.0.1", runtime: Any = None) -> Request:
    return Request(
        {
            "type": "http",
            "method": "GET",
            "scheme": "http",
            "headers": [(name.encode(), text.encode("latin-1")) for name, text in headers.items()],
            "client": (peer, 1234),
            "app": SimpleNamespace(state=SimpleNamespace(runtime=runtime)),
        }
    )


def calls(headers: dict[str, str]) -> list[tuple[object, ...]]:
    """What is asked of the control plane about this request."""
    asked = Asked()
    settings = SimpleNamespace(trusted_proxies=())
    runtime = SimpleNamespace(control_plane=asked, settings=settings)
    assert asyncio.run(authenticate(request(headers, runtime=runtime))) is ROOT
    return asked.calls


def test_a_session_is_asked_for_with_its_tenant_and_how_long_its_person_was_idle() -> None:
    sent = {**COOKIE, "x-loraplex-tenant": "acme", "x-loraplex-idle-seconds": "420"}
    assert calls(sent) == [("session", SESSION.text, "acme", timedelta(minutes=7))]


def test_a_key_goes_before_a_session() -> None:
    sent = {**COOKIE, "authorization": f"Bearer {KEY.text}"}
    assert calls(sent) == [("key", KEY.text, None)]
    assert credential_id(request(sent), ()) == KEY.key_id
    assert credential_id(request(COOKIE), ()) == SESSION.hash


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [("90", 90), ("999999999", 999_999_999), ("1" * 10, 0), ("-1", 0), ("1.5", 0), ("²", 0)],
)
def test_an_idle_time_that_is_none_is_no_time(sent: str, seconds: int) -> None:
    assert idle_of(request({"x-loraplex-idle-seconds": sent})) == timedelta(seconds=seconds)


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
        (None, None, "192.0.2.7", "missing_api_key"),
        ("secret", "secret", "192.0.2.7", None),
        ("secret", "other", "127.0.0.1", "invalid_api_key"),
        ("secret", None, "127.0.0.1", "missing_api_key"),
    ],
)
def test_metrics_are_for_the_token_or_without_one_for_this_machine(
    token: str | None, sent: str | None, peer: str, code: str | None
) -> None:
    asked = request({} if sent is None else {"authorization": f"Bearer {sent}"}, peer)
    if code is None:
        check_metrics_access(asked, token, ())
        return
    with pytest.raises(ApiError) as caught:
        check_metrics_access(asked, token, ())
    assert caught.value.code == code
