"""How keys are sent, and what needs none. `test_access` asks every route."""

from __future__ import annotations

import socket

import httpx

from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest


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
