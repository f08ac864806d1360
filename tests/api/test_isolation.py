"""Tenants on one server: each gets its own data, and learns nothing about the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.secrets_scan import MARK
from support.server import Caller, ServerUnderTest

MARKER = f"{MARK}-PROMPT"
UNKNOWN = "named-by-mistake"
"""A model's name; the log of requests that the tenant may read keeps it."""
GO_ON = {"ignore_eos": True}


@pytest.fixture
def neighbours(
    make_caller: Callable[[], Caller], adapters: list[Path]
) -> tuple[Caller, Caller, list[dict[str, Any]]]:
    """Two tenants, each with other weights under the same name, and their versions."""
    left, right = make_caller(), make_caller()
    return left, right, [left.push(adapters[0], "bot"), right.push(adapters[1], "bot")]


def test_the_same_name_answers_each_tenant_with_its_own_weights_in_one_batch(
    neighbours: tuple[Caller, Caller, list[dict[str, Any]]], server: ServerUnderTest
) -> None:
    *callers, versions = neighbours
    prompt = "The same prompt for both of them, long enough to fill a block or two."

    async def ask(caller: Caller) -> tuple[str, str, str, str]:
        async with caller.openai_async as client:
            raw = await client.completions.with_raw_response.create(
                model="bot", prompt=prompt, max_tokens=16, temperature=0, extra_body=GO_ON
            )
        answer = raw.parse()
        headers = raw.headers
        return (
            answer.choices[0].text,
            answer.model,
            headers["x-loraplex-digest"],
            headers["x-request-id"],
        )

    async def ask_together() -> list[tuple[str, str, str, str]]:
        return await asyncio.gather(*(ask(caller) for caller in callers * 4))

    alone = [asyncio.run(ask(caller)) for caller in callers]
    assert alone[0][0] != alone[1][0]
    for position, (text, model, digest, request_id) in enumerate(asyncio.run(ask_together())):
        owner = position % 2
        assert text == alone[owner][0]
        assert model == versions[owner]["id"]
        assert digest == versions[owner]["digest"]
        usage = server.usage_of(request_id, callers[owner])
        assert usage is not None
        assert usage.adapter_digest == digest
        assert server.usage_of(request_id, callers[1 - owner]) is None


def test_prefix_caches_do_not_meet(
    neighbours: tuple[Caller, Caller, list[dict[str, Any]]], adapters: list[Path]
) -> None:
    left, right, _ = neighbours
    right.push(adapters[0], "copy")
    prompt = "A prompt of several blocks that both tenants happen to send, word for word."

    def num_cached(caller: Caller, model: str) -> int:
        answer = caller.openai.completions.create(model=model, prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    for model in ("bot", "tiny"):
        assert num_cached(left, model) == 0
        assert num_cached(left, model) > 0
        assert num_cached(right, model) == 0
    assert num_cached(right, "copy") == 0


def test_deleting_equal_bytes_leaves_the_other_tenant_serving(
    make_caller: Callable[[], Caller], adapters: list[Path]
) -> None:
    left, right = make_caller(), make_caller()
    ask: dict[str, Any] = {"model": "bot", "prompt": "x", "max_tokens": 8, "temperature": 0}
    for caller in (left, right):
        caller.push(adapters[2], "bot")
    before = right.openai.completions.create(**ask).choices[0].text
    assert left.http.delete("/v1/adapters/bot").status_code == 200
    assert right.openai.completions.create(**ask).choices[0].text == before


def test_no_log_line_holds_a_prompt_an_answer_or_a_key(
    resident: Caller, server: ServerUnderTest
) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "bot", "prompt": MARKER, "max_tokens": 4},
        {"model": "bot", "prompt": MARKER, "max_tokens": 4, "stop": 7},
        {"model": UNKNOWN, "prompt": MARKER},
        {"model": "bot", "prompt": [MARKER, 3]},
    ]
    for body in bodies:
        resident.http.post("/v1/completions", json=body)
    resident.http.post(f"/v1/{MARKER}", params={"key": resident.key})
    resident.http.get("/v1/models", headers={"authorization": f"Bearer {resident.key}x"})
    log = server.log.read_text()
    assert "request_finished" in log
    for secret in (MARKER, UNKNOWN, resident.key, resident.key.split("_")[-1]):
        assert secret not in log
