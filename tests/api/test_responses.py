"""`/v1/responses` through the unmodified openai client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseTextDeltaEvent

from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest

GO_ON: dict[str, Any] = {"ignore_eos": True, "seed": 5}
ASK: dict[str, Any] = {"model": "bot", "input": "Hello there", "max_output_tokens": 8}
BODY = {**ASK, **GO_ON}


def chat_text(caller: Caller, messages: list[dict[str, Any]], **options: Any) -> str:
    """What a chat of these messages answers."""
    body = {"model": "bot", "messages": messages, "max_tokens": 8, **GO_ON, **options}
    answer = caller.http.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_answers_what_a_chat_answers(resident: Caller) -> None:
    response = resident.openai.responses.create(
        **ASK, instructions="Be brief", metadata={"a": "b"}, user="me", extra_body=GO_ON
    )
    assert response.output_text == chat_text(
        resident,
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello there"}],
    )
    assert response.object == "response"
    assert response.model == "resident/bot@1"
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata, response.user) == (
        "Be brief",
        {"a": "b"},
        "me",
    )
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8


def test_an_answer_that_ends_by_itself_is_completed(resident: Caller) -> None:
    end = {"logit_bias": {"256": 100}}  # the end of sequence
    response = resident.openai.responses.create(**ASK, extra_body=end)
    assert response.status == "completed"
    assert response.output_text == ""
    assert isinstance(response.output[0], ResponseOutputMessage)


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "a\nb"}],
        [
            {"type": "message", "role": "system", "content": "Be brief"},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            },
        ],
    ],
)
def test_items_that_mean_the_same_as_messages_give_the_same(
    resident: Caller, items: list[dict[str, Any]]
) -> None:
    response = resident.openai.responses.create(**{**ASK, "input": items}, extra_body=GO_ON)
    said = chat_text(
        resident, [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}]
    )
    assert response.output_text == said


def test_an_answer_given_back_is_the_assistants_message(resident: Caller) -> None:
    client = resident.openai
    question: list[Any] = [{"role": "user", "content": "a"}]
    first = client.responses.create(**{**ASK, "input": question}, extra_body=GO_ON)
    question += [*first.output, {"role": "user", "content": "b"}]
    second = client.responses.create(**{**ASK, "input": question}, extra_body=GO_ON)
    assert second.output_text == chat_text(
        resident,
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "b"},
        ],
    )


def test_the_stream_helper_sees_every_event_and_the_same_response(resident: Caller) -> None:
    client = resident.openai
    whole = client.responses.create(**ASK, top_logprobs=2, extra_body=GO_ON)
    with client.responses.stream(**ASK, top_logprobs=2, extra_body=GO_ON) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if isinstance(e, ResponseTextDeltaEvent))
    assert text == whole.output_text
    assert _without_identity(events[-1].response) == _without_identity(whole)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert sum(len(e.logprobs) for e in deltas) <= 8
    (message,) = whole.output
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert part.type == "output_text"
    assert [len(entry.top_logprobs) for entry in part.logprobs or []] == [2] * 8


def test_the_stream_helper_gives_the_final_response(resident: Caller) -> None:
    end = {"logit_bias": {"256": 100}}
    with resident.openai.responses.stream(**ASK, extra_body=end) as stream:
        response = stream.get_final_response()
    assert response.status == "completed"
    assert response.output_text == ""


def test_the_async_client_streams(resident: Caller) -> None:
    async def ask() -> str:
        async with resident.openai_async as client:
            stream = await client.responses.create(**ASK, stream=True, extra_body=GO_ON)
            return "".join(
                [e.delta async for e in stream if e.type == "response.output_text.delta"]
            )

    assert asyncio.run(ask()) == chat_text(resident, [{"role": "user", "content": "Hello there"}])


def test_every_event_is_named_and_nothing_follows_the_last(resident: Caller) -> None:
    answer = resident.http.post("/v1/responses", json={**BODY, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_usage_is_in_the_ledger(resident: Caller, server: ServerUnderTest) -> None:
    raw = resident.openai.responses.with_raw_response.create(**ASK, extra_body=GO_ON)
    usage = server.usage_of(raw.headers["x-request-id"], resident)
    response = raw.parse()
    assert response.usage is not None
    assert usage is not None
    assert usage.completion_tokens == response.usage.output_tokens == 8
    assert usage.prompt_tokens == response.usage.input_tokens


REFUSED = [
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["web_search_call.results"]}, "include"),
    ({"n": 2}, "n"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content.0.type",
    ),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    resident: Caller, change: dict[str, Any], param: str
) -> None:
    answer = resident.http.post("/v1/responses", json={**BODY, **change})
    check_envelope(answer, "unsupported_parameter", param)


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["x"]}, "input.0"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}]},
        "input.0.arguments",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("change", "param"), BAD_VALUES)
def test_a_bad_value_is_named(resident: Caller, change: dict[str, Any], param: str) -> None:
    answer = resident.http.post("/v1/responses", json={**BODY, **change})
    check_envelope(answer, "invalid_parameter", param)


def test_a_stream_that_fails_raises_the_clients_error(resident: Caller) -> None:
    stream = resident.openai.responses.create(
        **{**ASK, "max_output_tokens": 400},
        stream=True,
        extra_body={"ignore_eos": True, "deadline_ms": 60},
    )
    with pytest.raises(openai.APIError) as failed:
        for _ in stream:
            pass
    assert failed.value.code == "deadline_exceeded"


def _without_identity(response: Response) -> dict[str, Any]:
    """What two answers to the same request have in common."""
    dumped = response.model_dump(exclude={"id", "created_at"})
    for item in dumped["output"]:
        del item["id"]
    del dumped["usage"]["input_tokens_details"]
    del dumped["usage"]["output_tokens_details"]
    left: dict[str, Any] = _parsed_left_out(dumped)
    return left


def _parsed_left_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _parsed_left_out(v) for k, v in value.items() if k != "parsed"}
    return [_parsed_left_out(v) for v in value] if isinstance(value, list) else value
