"""Access control: every route is closed unless it is listed as open."""

from __future__ import annotations

import re
import socket
from typing import Any

import httpx
import pytest

from loraplex.api.app import create_app
from loraplex.platform.keys.principal import Scope
from support.envelopes import check_envelope
from support.published import OPEN
from support.server import Caller, ServerUnderTest


def all_operations() -> list[tuple[str, str]]:
    """Method and path of everything the application answers."""
    app = create_app(None)  # type: ignore[arg-type]  # the schema needs no runtime
    return [
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    ]


def concrete(path: str) -> str:
    """A path with something in the place of each parameter."""
    return re.sub(r"\{[^}]*\}", "1", path)


def test_every_route_is_walked() -> None:
    paths = {path for _, path in all_operations()}
    assert {f"{method} {path}" for method, path in all_operations()} >= OPEN
    assert len(paths) >= 15


@pytest.mark.parametrize(("method", "path"), all_operations())
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Basic eDp5"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer lpx_live_unknown"},
    ],
    ids=["none", "empty", "basic", "blank", "unknown"],
)
def test_without_a_valid_key_every_route_answers_401(
    server: ServerUnderTest, method: str, path: str, headers: dict[str, str]
) -> None:
    if f"{method} {path}" in OPEN:
        return
    answer = httpx.request(method, server.url + concrete(path), headers=headers, content=b"{")
    assert answer.status_code == 401, path
    assert answer.json()["error"]["code"] in {"missing_api_key", "invalid_api_key"}
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_host_that_is_none_opens_no_route(server: ServerUnderTest) -> None:
    for method, path in all_operations():
        url = server.url + concrete(path)
        answer = httpx.request(method, url, headers={"host": "a/?x="}, content=b"{")
        check_envelope(answer, "malformed_request")


def test_an_anonymous_body_is_not_waited_for(server: ServerUnderTest) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        assert connection.recv(64).startswith(b"HTTP/1.1 401 ")


def test_a_key_without_its_scheme_is_told_how_to_be_sent(resident: Caller) -> None:
    answer = httpx.get(f"{resident.url}/v1/models", headers={"authorization": resident.key})
    check_envelope(answer, "missing_api_key")
    assert "`Authorization: Bearer <key>`" in answer.json()["error"]["message"]


def test_two_keys_at_once_are_no_key(resident: Caller) -> None:
    headers = [("authorization", f"Bearer {resident.key}")] * 2
    answer = httpx.get(f"{resident.url}/v1/models", headers=headers)
    check_envelope(answer, "malformed_request")


@pytest.mark.parametrize(
    ("scope", "method", "path", "body"),
    [
        (Scope.INFER, "GET", "/v1/models", None),
        (Scope.ADAPTERS_READ, "GET", "/v1/adapters", None),
        (Scope.ADAPTERS_WRITE, "DELETE", "/v1/adapters/none", None),
        (Scope.ADAPTERS_WRITE, "GET", "/v1/uploads/none", None),
    ],
)
def test_a_key_does_what_its_scopes_allow(
    server: ServerUnderTest, scope: Scope, method: str, path: str, body: Any
) -> None:
    suffix = f"{scope.replace(':', '-')}-{method.lower()}-{path.rsplit('/')[-1]}"
    allowed = server.make_caller(f"with-{suffix}", [scope])
    others = server.make_caller(f"without-{suffix}", [other for other in Scope if other != scope])
    assert allowed.http.request(method, path).status_code in {200, 404}
    refused = others.http.request(method, path)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "insufficient_scope"


def test_health_and_readiness_need_no_key(server: ServerUnderTest) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}


def test_metrics_are_open_to_this_machine(server: ServerUnderTest, resident: Caller) -> None:
    resident.openai.completions.create(model="bot", prompt="x", max_tokens=2)
    text = httpx.get(f"{server.url}/metrics").text
    assert 'loraplex_http_requests_total{code="",method="POST",route="/v1/completions"' in text
    assert 'loraplex_tokens_total{kind="completion",tenant="resident"}' in text
    assert "loraplex_time_to_first_token_seconds_bucket" in text
    assert "loraplex_adapter_tier_bytes" in text
    assert "sha256" not in text
