"""Tools through the unmodified openai client: chats and responses, complete and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from support.envelopes import check_envelope
from support.server import Caller

pytest.importorskip("llguidance", reason="grammars need llguidance")

CITIES = ["Paris", "Rome"]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Forecasts.", "parameters": PARAMETERS},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
FLAT_WEATHER: Any = {"type": "function", **WEATHER["function"], "strict": True}
HELLO: Any = [{"role": "user", "content": "Will it rain?"}]
ASK: dict[str, Any] = {"model": "tooled", "messages": HELLO, "max_tokens": 400}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def check_arguments(arguments: str) -> None:
    parsed = json.loads(arguments)
    assert set(parsed) == {"city", "days"}
    assert parsed["city"] in CITIES
    assert parsed["days"] in (1, 2)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_call_that_is_asked_for_is_made_and_follows_its_schema(
    tool_caller: Caller, choice: Any, seed: int
) -> None:
    answer = tool_caller.openai.chat.completions.create(
        **ASK, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, seed=seed
    )
    (answered,) = answer.choices
    assert answered.finish_reason == "tool_calls"
    assert answered.message.content is None
    (call,) = answered.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    check_arguments(call.function.arguments)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_function_without_parameters_is_called_without_arguments(
    tool_caller: Caller, seed: int
) -> None:
    answer = tool_caller.openai.chat.completions.create(
        **ASK, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, seed=seed
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {}


def test_a_stream_names_the_call_first_and_then_tells_its_arguments(tool_caller: Caller) -> None:
    body: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": NAMED, "seed": 4}
    client = tool_caller.openai
    whole = client.chat.completions.create(**ASK, **body)
    chunks = list(client.chat.completions.create(**ASK, **body, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert all(call.function for call in calls)
    opened, *rest = calls
    assert opened.function is not None
    assert (opened.index, opened.type, opened.function.name) == (0, "function", "weather")
    assert opened.id
    assert opened.function.arguments == ""
    assert all(call.id is None and call.function and not call.function.name for call in rest)
    assert len(rest) > 3, "the arguments come as they are written"
    arguments = "".join(call.function.arguments or "" for call in rest if call.function)
    assert arguments == (whole.choices[0].message.tool_calls or [])[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert all(not delta.content for delta in deltas)


def test_the_stream_helper_follows_several_calls_and_choices(tool_caller: Caller) -> None:
    with tool_caller.openai.chat.completions.stream(
        **ASK, tools=[WEATHER, CLOCK], tool_choice="required", n=2, seed=8
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert len(final.choices) == 2
    for choice in final.choices:
        for call in choice.message.tool_calls or []:
            assert call.function.name in ("weather", "clock")
            json.loads(call.function.arguments)
        assert choice.message.tool_calls


class Weather(BaseModel):
    """Forecasts."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def test_a_strict_tool_is_parsed_into_its_model(tool_caller: Caller) -> None:
    answer = tool_caller.openai.chat.completions.parse(
        **ASK, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required",
        parallel_tool_calls=False, seed=2,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_strict_tool_that_may_be_called_leaves_text_free(tool_caller: Caller) -> None:
    tool: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    answer = tool_caller.openai.chat.completions.create(
        **{**ASK, "max_tokens": 12}, tools=[tool], seed=2
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_calls_and_their_results_go_back_and_forth(tool_caller: Caller) -> None:
    client = tool_caller.openai
    first = client.chat.completions.create(
        **ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=3
    )
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    talk: Any = [*HELLO, message, result]
    second = client.chat.completions.create(
        model="tooled", messages=talk, max_tokens=4, tools=[WEATHER], tool_choice="none", seed=3
    )
    assert second.choices[0].message.tool_calls is None
    parts: Any = {**result, "content": [{"type": "text", "text": "It rains."}]}
    again = client.chat.completions.create(
        model="tooled", messages=[*HELLO, message, parts], max_tokens=4, seed=3
    )
    assert again.choices[0].message.content == second.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens > 100, "the call and its result are in the prompt"


def test_calls_that_are_cut_off_end_by_length(tool_caller: Caller) -> None:
    answer = tool_caller.openai.chat.completions.create(
        **{**ASK, "max_tokens": 60}, tools=[WEATHER], tool_choice="required", seed=3
    )
    assert answer.choices[0].finish_reason == "length"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments.startswith('{"city')


def test_a_template_without_tools_has_them_described(resident: Caller) -> None:
    answer = resident.openai.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=70, tools=[CLOCK], tool_choice="required", seed=1,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("clock", "{}")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 200


def test_responses_call_functions(tool_caller: Caller) -> None:
    client = tool_caller.openai
    ask: dict[str, Any] = {
        "model": "tooled",
        "input": "Will it rain?",
        "tools": [FLAT_WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "extra_body": {"seed": 6},
    }
    response = client.responses.create(**ask)
    assert response.status == "completed"
    (call,) = response.output
    assert call.type == "function_call"
    assert call.name == "weather"
    check_arguments(call.arguments)
    assert response.to_dict()["tool_choice"] == ask["tool_choice"]
    with client.responses.stream(**ask) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        final = stream.get_final_response()
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert final.output[0].arguments == call.arguments  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    talk: Any = [{"role": "user", "content": "Will it rain?"}, call, result]
    after = client.responses.create(model="tooled", input=talk, max_output_tokens=4)
    assert after.usage is not None
    assert after.usage.input_tokens > 100


def test_the_async_client_calls(tool_caller: Caller) -> None:
    async def ask() -> Any:
        async with tool_caller.openai_async as client:
            return await client.chat.completions.create(
                **ASK, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False
            )

    answer = asyncio.run(ask())
    assert answer.choices[0].message.tool_calls[0].function.name == "clock"


REFUSED = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{**CLOCK, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role"),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tools": [CLOCK] * 129}, "tools"),
    ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {
            "tools": [CLOCK],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []},
        },
        "tool_choice",
    ),
    ({"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.type",
    ),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_what_is_no_function_is_refused_by_name(
    resident: Caller, change: dict[str, Any], param: str
) -> None:
    answer = resident.http.post("/v1/chat/completions", json={**ASK, "model": "tiny", **change})
    check_envelope(answer, "unsupported_parameter", param)


@pytest.mark.parametrize(("change", "param"), BAD)
def test_what_does_not_fit_is_named(resident: Caller, change: dict[str, Any], param: str) -> None:
    answer = resident.http.post("/v1/chat/completions", json={**ASK, "model": "tiny", **change})
    check_envelope(answer, "invalid_parameter", param)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("arguments", "is_taken"),
    [
        ("", True),
        (nested(150), True),
        (nested(5000), False),
        ('{"a": "\\ud800"}', False),
        ('{"a": NaN}', False),
        ("[1]", False),
        ('{"a": 1', False),
    ],
    ids=lambda value: str(value)[:12],
)
def test_hostile_arguments_of_a_past_call_are_taken_or_refused(
    tool_caller: Caller, arguments: str, is_taken: bool
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"model": "tooled", "messages": talk, "max_tokens": 1}
    answer = tool_caller.http.post("/v1/chat/completions", json=body)
    if is_taken:
        assert answer.is_success, answer.text
    else:
        check_envelope(answer, "invalid_parameter", "messages.1.tool_calls.0.function.arguments")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_hostile_schemas_of_tools_are_taken_or_refused(tool_caller: Caller, choice: str) -> None:
    for schema in (
        nested(150),
        '{"type": "object", "properties": {"a": {"maximum": 1e308}}}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
        '{"type": "object", "x-guidance": {"whitespace_flexible": "yes"}}',
        '{"type": "string"}',
        "{}",
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(schema)}}
        body = {**ASK, "max_tokens": 1, "tools": [tool], "tool_choice": choice}
        answer = tool_caller.http.post("/v1/chat/completions", json=body)
        if not answer.is_success:
            check_envelope(answer, "invalid_grammar", "tools")
