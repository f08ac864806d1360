"""Refused requests: each with its own code and status, in the error format."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from support.envelopes import check_envelope
from support.server import Caller

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


BAD_VALUES = [
    (CHAT, {"model": ""}, "model"),
    (CHAT, {"model": 3}, "model"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"n": 9}, "n"),
    (CHAT, {"temperature": 2.1}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"top_p": -0.1}, "top_p"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"min_p": 1.1}, "min_p"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"seed": 1 << 63}, "seed"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"stop": ["x", 3]}, "stop.1"),
    (CHAT, {"stop": "é" * 129}, "stop.0"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    (CHAT, {"logit_bias": {"100000": 1}}, "logit_bias"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"speculation": "fast"}, "speculation"),
    (CHAT, {"speculation": 4}, "speculation"),
    (CHAT, {"speculation": {"proposer": ""}}, "speculation.proposer"),
    (CHAT, {"speculation": {"num_tokens": 65}}, "speculation.num_tokens"),
    (PLAIN, {"speculation": {"num_tokens": -1}}, "speculation.num_tokens"),
    (PLAIN, {"speculation": {"num_tokens": True}}, "speculation.num_tokens"),
    (CHAT, {"kv_policy": "snapkv"}, "kv_policy"),
    (CHAT, {"kv_policy": {"method": "lru", "budget": 64}}, "kv_policy.method"),
    (CHAT, {"kv_policy": {"method": "snapkv"}}, "kv_policy.budget"),
    (CHAT, {"kv_policy": {"method": "snapkv", "budget": 32}}, "kv_policy.budget"),
    (PLAIN, {"kv_policy": {"method": "h2o", "budget": 1}}, "kv_policy.budget"),
    (PLAIN, {"prompt": []}, "prompt"),
    (PLAIN, {"prompt": ""}, "prompt"),
    (PLAIN, {"prompt": [1, -1]}, "prompt.0.1"),
    (PLAIN, {"prompt": [100000]}, "prompt"),
    (PLAIN, {"prompt": ["a", 3]}, "prompt.1"),
    (PLAIN, {"prompt": ["a"] * 9, "n": 8}, "n"),
    (PLAIN, {"prompt": ["a"] * 9, "best_of": 8}, "best_of"),
    (PLAIN, {"best_of": 21}, "best_of"),
    (PLAIN, {"best_of": 1, "n": 2}, "best_of"),
    (PLAIN, {"best_of": 2, "stream": True}, "best_of"),
    (PLAIN, {"logprobs": 21}, "logprobs"),
    (PLAIN, {"max_tokens": 0}, "max_tokens"),
    (PLAIN, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (PLAIN, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (PLAIN, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    (PLAIN, {"echo": True, "logprobs": 0, "n": 2, "stream": True}, "n"),
    (PLAIN, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (PLAIN, {"truncate_prompt_tokens": 0}, "prompt"),
]


@pytest.mark.parametrize(("body", "change", "param"), BAD_VALUES)
def test_a_value_out_of_range_is_named(
    resident: Caller, body: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    path = "/v1/chat/completions" if body is CHAT else "/v1/completions"
    answer = resident.http.post(path, json={**body, **change})
    check_envelope(answer, "invalid_parameter", param)


UNSUPPORTED = [
    (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format.type"),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (CHAT, {"audio": {}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"cache_salt": "x"}, "cache_salt"),
    (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    (CHAT, {"temprature": 1}, "temprature"),
    (CHAT, {"speculation": {"k": 4}}, "speculation.k"),
    (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
    ),
    (PLAIN, {"suffix": "x"}, "suffix"),
    (PLAIN, {"prompt_embeds": "AA=="}, "prompt_embeds"),
]


@pytest.mark.parametrize(("body", "change", "param"), UNSUPPORTED)
def test_what_would_change_the_meaning_is_refused_by_name(
    resident: Caller, body: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    path = "/v1/chat/completions" if body is CHAT else "/v1/completions"
    answer = resident.http.post(path, json={**body, **change})
    check_envelope(answer, "unsupported_parameter", param)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]x", b'{"model": "\xff"}', b"[" * 100_000, b'{"a": "\\ud800"}']
)
def test_what_is_not_json_is_refused(resident: Caller, content: bytes) -> None:
    answer = resident.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    check_envelope(answer, "invalid_json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-Infinity"])
def test_numbers_that_are_none_are_refused(resident: Caller, number: str) -> None:
    content = json.dumps(CHAT)[:-1] + f', "temperature": {number}}}'
    answer = resident.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    check_envelope(answer, "invalid_parameter", "temperature")


def test_a_form_and_a_compressed_body_are_refused(resident: Caller) -> None:
    form = resident.http.post("/v1/chat/completions", data={"model": "tiny"})
    check_envelope(form, "unsupported_media_type")
    packed = resident.http.post(
        "/v1/chat/completions", json=CHAT, headers={"content-encoding": "gzip"}
    )
    check_envelope(packed, "unsupported_media_type")


@pytest.mark.parametrize("is_length_declared", [True, False])
def test_a_body_beyond_the_limit_is_refused(resident: Caller, is_length_declared: bool) -> None:
    content = json.dumps({**PLAIN, "prompt": "x" * (5 << 20)}).encode()
    parts = (
        content
        if is_length_declared
        else (content[i : i + 65536] for i in range(0, len(content), 65536))
    )
    answer = resident.http.post(
        "/v1/completions", content=parts, headers={"content-type": "application/json"}
    )
    check_envelope(answer, "body_too_large")


def test_a_prompt_beyond_the_context_is_refused(resident: Caller) -> None:
    for path, body in (
        ("/v1/completions", {**PLAIN, "prompt": "x" * 600}),
        ("/v1/completions", {**PLAIN, "prompt": "x" * 500, "max_tokens": 20}),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "x" * 600}]},
        ),
    ):
        check_envelope(resident.http.post(path, json=body), "context_length_exceeded")


def test_unknown_paths_and_methods_have_the_envelope(resident: Caller) -> None:
    http = resident.http
    check_envelope(http.get("/v1/nothing"), "not_found")
    check_envelope(http.get("/v1/chat/completions/"), "not_found")
    check_envelope(http.delete("/v1/chat/completions"), "method_not_allowed")
    forgotten = http.post("/chat/completions", json=CHAT)
    assert "/v1/chat/completions" in check_envelope(forgotten, "not_found")["message"]


def test_an_unknown_model_is_never_answered_by_the_base(resident: Caller) -> None:
    for model in ("nothing", "resident/nothing", "bot@9", "bot@nothing", "bot@sha256:" + "0" * 64):
        answer = resident.http.post("/v1/chat/completions", json={**CHAT, "model": model})
        check_envelope(answer, "model_not_found")


def test_the_official_client_raises_its_own_errors(resident: Caller) -> None:
    client = resident.openai
    hello: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=hello, n=9)
    assert bad.value.code == "invalid_parameter"
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=hello)
    assert missing.value.code == "model_not_found"
    stranger = client.with_options(api_key="lpx_live_wrong")
    with pytest.raises(openai.AuthenticationError) as unknown:
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="x" * (5 << 20))
    assert large.value.status_code == 413
    assert large.value.code == "body_too_large"
