"""Answers beyond the context length, through every route that gives answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.envelopes import check_envelope
from support.server import Caller, serving

CONTEXT, NUM_TOKENS = 64, 150
OPTIONS = {"--max-model-len": CONTEXT, "--attention-window": 12, "--attention-sinks": 0}
MESSAGES = [{"role": "user", "content": "on and on"}]
ENDLESS = {"model": "tiny", "endless": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def windowed(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    options = [text for name, value in OPTIONS.items() for text in (name, str(value))]
    data_dir = tmp_path_factory.mktemp("windowed")
    with serving(tiny_base, data_dir, "--served-model-name", "tiny", *options) as server:
        yield server.make_caller("endless")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "limit", "used"),
    [
        ("/v1/completions", {"prompt": "on"}, "max_tokens", "completion_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens", "completion_tokens"),
        ("/v1/responses", {"input": "on"}, "max_output_tokens", "output_tokens"),
        ("/v1/messages", {"messages": MESSAGES}, "max_tokens", "output_tokens"),
    ],
)
def test_an_answer_has_all_the_tokens_that_its_request_bounds(
    windowed: Caller, path: str, body: dict[str, Any], limit: str, used: str
) -> None:
    request = {**ENDLESS, **body, limit: NUM_TOKENS}
    answer = windowed.http.post(path, json=request)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"][used] == NUM_TOKENS > 2 * CONTEXT
    refused = windowed.http.post(path, json={**request, "endless": False})
    assert refused.status_code == 400
    assert "64" in refused.text


@pytest.mark.slow
def test_a_stream_goes_on_until_its_stop_string_and_its_usage_is_exact(windowed: Caller) -> None:
    body = {**ENDLESS, "prompt": "on", "max_tokens": NUM_TOKENS}
    whole = windowed.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = whole[-12:-8]
    expected = whole[: whole.index(stop)]
    events = windowed.http.post(
        "/v1/completions",
        json={**body, "stop": stop, "stream": True, "stream_options": {"include_usage": True}},
    ).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == expected
    usage = chunks[-1]["usage"]
    assert 0 < usage["completion_tokens"] <= NUM_TOKENS


@pytest.mark.slow
def test_every_token_is_in_the_ledger(windowed: Caller) -> None:
    def used() -> int:
        usage = windowed.http.get("/v1/usage").json()
        return sum(row["completion_tokens"] for row in usage["data"])

    before = used()
    answer = windowed.http.post(
        "/v1/completions", json={**ENDLESS, "prompt": ["on", "off"], "max_tokens": NUM_TOKENS}
    )
    assert answer.json()["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert used() - before == 2 * NUM_TOKENS


@pytest.mark.slow
def test_the_maximum_of_tokens_has_to_be_given(windowed: Caller) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "on"}),
    ):
        refused = windowed.http.post(path, json={**ENDLESS, **body})
        check_envelope(refused, "invalid_parameter", "endless")


def test_a_base_that_attends_to_all_tokens_refuses_it(caller: Caller) -> None:
    refused = caller.http.post("/v1/completions", json={**ENDLESS, "prompt": "on"})
    check_envelope(refused, "endless_not_served", "endless")
    assert "memory would grow" in refused.json()["error"]["message"]
