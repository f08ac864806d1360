"""Tools of `/v1/messages` through the unmodified anthropic client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.envelopes import check_envelope
from support.server import Caller

pytest.importorskip("llguidance", reason="grammars need llguidance")
anthropic = pytest.importorskip("anthropic", reason="asks through the official client")

CITIES = ["Paris", "Rome"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "Forecasts.", "input_schema": SCHEMA}
CLOCK: Any = {
    "name": "clock",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}
HELLO: Any = [{"role": "user", "content": "Will it rain?"}]
ASK: dict[str, Any] = {"model": "tooled", "messages": HELLO, "max_tokens": 400}
NAMED: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


@pytest.fixture
def client(tool_caller: Caller) -> Iterator[Any]:
    url, key = tool_caller.url, tool_caller.key
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, NAMED])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_call_that_is_asked_for_is_made_and_follows_its_schema(
    client: Any, choice: Any, seed: int
) -> None:
    message = client.messages.create(
        **ASK, tools=[WEATHER], tool_choice=choice, extra_body={"seed": seed}
    )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert (block.type, block.name) == ("tool_use", "weather")
    assert block.input["city"] in CITIES
    assert block.input["days"] in (1, 2)


def test_a_stream_opens_the_call_and_then_tells_its_input(client: Any) -> None:
    asked = {**ASK, "tools": [WEATHER, CLOCK], "tool_choice": NAMED, "extra_body": {"seed": 4}}
    whole = client.messages.create(**asked)
    raw = list(client.messages.create(**asked, stream=True))
    (opened,) = [event for event in raw if event.type == "content_block_start"]
    assert (opened.index, opened.content_block.name) == (0, "weather")
    assert opened.content_block.input == {}
    deltas = [event.delta for event in raw if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta.partial_json for delta in deltas)) == whole.content[0].input
    (ended,) = [event for event in raw if event.type == "message_delta"]
    assert ended.delta.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    assert message.content[0].input == whole.content[0].input


def test_results_make_the_prompt_that_a_chat_with_them_has(
    tool_caller: Caller, client: Any
) -> None:
    call = {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Rome"}}
    results = [
        {"type": "tool_result", "tool_use_id": "call00001", "content": "sunny"},
        {"type": "text", "text": "So?"},
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": results},
    ]
    counted = client.messages.count_tokens(model="tooled", messages=messages, tools=[WEATHER])
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    tokens = tool_caller.http.post(
        "/tokenize",
        json={
            "model": "tooled",
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": "call00001", "content": "sunny"},
                {"role": "user", "content": "So?"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "description": "Forecasts.",
                        "parameters": SCHEMA,
                    },
                }
            ],
        },
    )
    assert counted.input_tokens == tokens.json()["count"]


def test_the_model_is_told_that_a_result_is_an_error(client: Any) -> None:
    call = {"type": "tool_use", "id": "call00001", "name": "clock", "input": {}}

    def count(text: str, is_error: bool) -> int:
        result = {
            "type": "tool_result",
            "tool_use_id": "call00001",
            "content": text,
            "is_error": is_error,
        }
        messages = [
            *HELLO,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        tokens = client.messages.count_tokens(model="tooled", messages=messages, tools=[CLOCK])
        counted: int = tokens.input_tokens
        return counted

    assert count("broken", True) == count("Error: broken", False) > count("broken", False)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"tool_choice": NAMED}, "invalid_parameter", "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "invalid_parameter", "tools"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "unsupported_parameter",
            "tools.0.type",
        ),
        (
            {"tools": [{**WEATHER, "defer_loading": True}]},
            "unsupported_parameter",
            "tools.0.defer_loading",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "call00001", "name": "f", "input": {}}
                        ],
                    },
                ]
            },
            "invalid_parameter",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "unsupported_parameter",
            "messages.0.content.0.type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "call00001",
                                "content": [{"type": "image", "source": {}}],
                            }
                        ],
                    }
                ]
            },
            "unsupported_parameter",
            "messages.0.content.0.content.0.type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_use", "id": "call00001", "name": "f", "input": {}}
                        ],
                    }
                ]
            },
            "invalid_parameter",
            "messages.0.content",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tool_caller: Caller, changes: dict[str, Any], code: str, param: str
) -> None:
    answer = tool_caller.http.post("/v1/messages", json={**ASK, **changes})
    check_envelope(answer, code, param)
