"""Prompts, bodies and keys are not in the log, in figures, in errors or in the database."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.secrets_scan import MARK, database_bytes, leaks, secret_of
from support.server import Caller, ServerUnderTest

HELLO = [{"role": "user", "content": MARK}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": MARK}}
SHAPE = {"type": "object", "properties": {MARK: {"type": "string"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "stop": MARK, "user": MARK}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [MARK]}]}),
    (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "max_tokens": 2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SHAPE},
            },
        },
    ),
    ("/v1/completions", {"prompt": MARK, "max_tokens": 2, "echo": False}),
    ("/v1/completions", {"prompt": [MARK, 3]}),
    ("/v1/completions", {"prompt": MARK * 100, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": f"({MARK}"}}),
    ("/v1/completions", {"prompt": "x", "temperature": MARK}),
    ("/v1/responses", {"input": MARK, "instructions": MARK, "max_output_tokens": 2}),
    ("/v1/responses", {"input": [{"role": "user", "content": MARK}], "tools": MARK}),
    ("/v1/messages", {"messages": HELLO, "system": MARK, "max_tokens": 2}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2, "stop_sequences": [MARK]}),
    ("/v1/messages", {"messages": [{"role": MARK, "content": MARK}], "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HELLO, "tool_choice": {"type": MARK}}),
    ("/v1/embeddings", {"input": MARK}),
    ("/v1/embeddings", {"input": [MARK, 7]}),
    ("/v1/classify", {"input": MARK}),
    ("/v1/score", {"text_1": MARK, "text_2": [MARK, 7]}),
    ("/v1/rerank", {"query": MARK, "documents": [MARK]}),
    ("/tokenize", {"prompt": MARK}),
    ("/detokenize", {"tokens": MARK}),
]

TELLING = {"invalid_grammar", "tenant_not_found"}
"""Errors about a name or an expression, which they repeat to whoever sent it."""


@pytest.fixture(scope="module")
def told(server: ServerUnderTest, resident: Caller) -> tuple[list[str], list[httpx.Response]]:
    """The secrets of a busy caller, and the errors that it was answered with."""
    http = resident.http
    answers = [http.post(path, json={"model": "bot", **body}) for path, body in BODIES]
    once = {"idempotency-key": "no-secrets"}
    body = {"name": "ci", "scopes": ["infer"]}
    issued = [http.post("/v1/keys", json=body, headers=once).json()["key"] for _ in range(2)]
    assert issued[0] == issued[1]
    rotated = http.post(f"/v1/keys/{issued[0].split('_')[2]}/rotate", json={}).json()["key"]
    answers += [
        http.post(f"/v1/{MARK}", params={"key": resident.key, "prompt": MARK}),
        http.get("/v1/models", headers={"authorization": f"Bearer {resident.key}x"}),
        http.get("/v1/models", headers={"authorization": f"Basic {MARK}"}),
        http.get("/v1/models", headers={"authorization": f"Bearer lpx_live_{MARK}"}),
        http.get("/v1/models", headers={"x-request-id": MARK, "x-loraplex-tenant": MARK}),
        http.post("/v1/keys", content=MARK, headers={"content-type": "application/json"}),
        http.post("/v1/chat/completions", content=f'{{"{MARK}": '.encode()),
    ]
    keys = [resident.key, server.make_operator("no-secrets"), issued[0], rotated]
    return [secret_of(key) for key in keys], [answer for answer in answers if not answer.is_success]


def test_the_log_holds_no_secret(
    server: ServerUnderTest, told: tuple[list[str], list[httpx.Response]]
) -> None:
    written = server.log.read_bytes()
    assert written.count(b"request_finished") >= len(BODIES)
    assert leaks(written, told[0]) == []


def test_the_metrics_hold_no_secret(
    server: ServerUnderTest, told: tuple[list[str], list[httpx.Response]]
) -> None:
    figures = httpx.get(f"{server.url}/metrics").content
    assert b"loraplex_http_requests_total" in figures
    assert leaks(figures, told[0]) == []


def test_the_database_holds_no_secret(
    server: ServerUnderTest, told: tuple[list[str], list[httpx.Response]]
) -> None:
    database = database_bytes(server.settings)
    assert b"no-secrets" in database, "what was written is there"
    assert leaks(database, told[0]) == []


def test_no_error_repeats_a_value(told: tuple[list[str], list[httpx.Response]]) -> None:
    secrets, refused = told
    assert len(refused) >= 12
    telling = {answer.json()["error"]["code"] for answer in refused if leaks(answer.content)}
    assert telling <= TELLING
    assert not any(secret in answer.text for answer in refused for secret in secrets)
