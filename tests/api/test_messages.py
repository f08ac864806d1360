"""`/v1/messages` through the unmodified anthropic client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraplex.api.formats.messages import MessageBlocks
from loraplex.api.tools.answer_part import ArgumentsText, CallOpened
from loraplex.platform.keys.principal import Scope
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

anthropic = pytest.importorskip("anthropic", reason="asks through the official client")

GO_ON: dict[str, Any] = {"ignore_eos": True, "seed": 5}
HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
ASK: dict[str, Any] = {"model": "bot", "messages": HELLO, "max_tokens": 8}
END = {"logit_bias": {"256": 100}}  # the end of sequence


@pytest.fixture
def client(resident: Caller) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=resident.url, api_key=resident.key, max_retries=0) as made:
        yield made


def chat(caller: Caller, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What `/v1/chat/completions` answers to these messages."""
    body = {"model": "bot", "messages": messages, "max_tokens": 8, **GO_ON, **options}
    answer = caller.http.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def chat_text(caller: Caller, messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = chat(caller, messages, **options)["choices"][0]["message"]["content"]
    return text


def test_answers_what_a_chat_answers(resident: Caller, client: Any) -> None:
    message = client.messages.create(**ASK, system="Be brief", extra_body=GO_ON)
    said = chat(resident, [{"role": "system", "content": "Be brief"}, *HELLO])
    (block,) = message.content
    assert (block.type, block.text) == ("text", said["choices"][0]["message"]["content"])
    assert (message.type, message.role) == ("message", "assistant")
    assert message.model == "resident/bot@1"
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8
    assert message.id == f"msg_{message._request_id}"


@pytest.mark.parametrize(
    ("system", "messages"),
    [
        ([{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}], HELLO),
        ("Be\nbrief", [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]),
    ],
)
def test_texts_and_lists_of_blocks_that_mean_the_same_give_the_same(
    resident: Caller, client: Any, system: Any, messages: list[Any]
) -> None:
    asked = {**ASK, "messages": messages, "system": system}
    message = client.messages.create(**asked, extra_body=GO_ON)
    expected = chat_text(resident, [{"role": "system", "content": "Be\nbrief"}, *HELLO])
    assert message.content[0].text == expected


def test_consecutive_messages_of_one_role_are_one(resident: Caller, client: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    message = client.messages.create(**{**ASK, "messages": messages}, extra_body=GO_ON)
    assert message.content[0].text == chat_text(resident, [{"role": "user", "content": "a\nb"}])


def test_an_answer_given_back_is_the_assistants_message(resident: Caller, client: Any) -> None:
    first = client.messages.create(**ASK, extra_body=GO_ON)
    more = {"role": "user", "content": "b"}
    given = [*HELLO, {"role": "assistant", "content": first.content}, more]
    second = client.messages.create(**{**ASK, "messages": given}, extra_body=GO_ON)
    said = {"role": "assistant", "content": first.content[0].text}
    assert second.content[0].text == chat_text(resident, [*HELLO, said, more])


def test_a_last_message_of_the_assistant_is_continued(resident: Caller, client: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    message = client.messages.create(**{**ASK, "messages": begun}, extra_body=GO_ON)
    assert message.content[0].text == chat_text(resident, begun, continue_final_message=True)
    assert message.content[0].text != chat_text(resident, begun)


def test_an_answer_without_a_word_ends_its_turn_and_has_no_block(client: Any) -> None:
    message = client.messages.create(**ASK, extra_body=END)
    assert (message.content, message.stop_reason) == ([], "end_turn")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_stop_sequence_is_named_and_no_part_of_the_text(client: Any, streams: bool) -> None:
    text = client.messages.create(**ASK, extra_body=GO_ON).content[0].text
    stop = text[3]
    asked = {**ASK, "stop_sequences": ["never", stop], "extra_body": GO_ON}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_the_stream_helper_sees_every_event_and_the_same_message(client: Any) -> None:
    whole = client.messages.create(**ASK, extra_body=GO_ON)
    raw = list(client.messages.create(**ASK, stream=True, extra_body=GO_ON))
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start = raw[0].message
    assert (start.content, start.stop_reason) == ([], None)
    with client.messages.stream(**ASK, extra_body=GO_ON) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        message = stream.get_final_message()
    for told in (start.usage, message.usage, whole.usage):
        cached = told.cache_read_input_tokens
        assert told.input_tokens + cached == whole.usage.input_tokens + (
            whole.usage.cache_read_input_tokens
        )
    left_out = {"id": True, "usage": True, "content": {0: {"parsed_output", "citations"}}}
    same = message.model_dump(exclude=left_out), whole.model_dump(exclude=left_out)
    assert same[0] == same[1]
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_the_async_client_streams(resident: Caller, client: Any) -> None:
    async def ask() -> str:
        make = anthropic.AsyncAnthropic
        async with (
            make(base_url=resident.url, api_key=resident.key) as asking,
            asking.messages.stream(**ASK, extra_body=GO_ON) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == client.messages.create(**ASK, extra_body=GO_ON).content[0].text


def test_tokens_of_a_known_prefix_are_counted_as_read_from_the_cache(
    resident: Caller, client: Any
) -> None:
    long = [{"role": "user", "content": "cached prefix of several blocks " * 4}]
    asked = {**ASK, "messages": long}
    first, again = (client.messages.create(**asked, extra_body=GO_ON).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert again.cache_read_input_tokens > 0
    total = chat(resident, long)["usage"]["prompt_tokens"]
    for usage in (first, again):
        assert usage.input_tokens + usage.cache_read_input_tokens == total


def test_the_counted_tokens_are_those_of_the_prompt(resident: Caller, client: Any) -> None:
    tool = {"name": "f", "description": "Does it.", "input_schema": {"type": "object"}}
    prompt = {"model": "bot", "messages": HELLO, "system": "Be brief", "tools": [tool]}
    counted = client.messages.count_tokens(**prompt).input_tokens
    usage = client.messages.create(**prompt, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    without = client.messages.count_tokens(**{**prompt, "tool_choice": {"type": "none"}})
    assert without.input_tokens < counted


def test_a_prompt_beyond_the_context_is_counted_and_not_answered(client: Any) -> None:
    asked = {**ASK, "messages": [{"role": "user", "content": "long " * 2000}]}
    asked.pop("max_tokens")
    assert client.messages.count_tokens(**asked).input_tokens > 2000
    with pytest.raises(anthropic.BadRequestError, match="context") as refused:
        client.messages.create(**asked, max_tokens=8)
    assert refused.value.body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_the_key_is_taken_from_both_headers(resident: Caller, header: str) -> None:
    value = resident.key if header == "x-api-key" else f"Bearer {resident.key}"
    answer = httpx.post(f"{resident.url}/v1/messages", json=ASK, headers={header: value})
    assert answer.is_success, answer.text


def test_the_bearer_token_takes_precedence_over_the_other_header(resident: Caller) -> None:
    both = {"x-api-key": "lpx_live_no", "authorization": f"Bearer {resident.key}"}
    assert httpx.post(f"{resident.url}/v1/messages", json=ASK, headers=both).is_success
    both = {"x-api-key": resident.key, "authorization": "Bearer lpx_live_no"}
    answer = httpx.post(f"{resident.url}/v1/messages", json=ASK, headers=both)
    check_envelope(answer, "invalid_api_key")


def test_no_other_route_takes_the_key_from_anthropics_header(resident: Caller) -> None:
    answer = httpx.get(f"{resident.url}/v1/models", headers={"x-api-key": resident.key})
    check_envelope(answer, "missing_api_key")


def test_two_keys_in_the_header_are_refused(resident: Caller) -> None:
    twice = [("x-api-key", resident.key), ("x-api-key", resident.key)]
    answer = httpx.post(f"{resident.url}/v1/messages", json=ASK, headers=twice)
    assert answer.json()["error"]["code"] == "malformed_request"


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "bad request": ({"max_tokens": 0}, "BadRequestError", "invalid_parameter"),
    "no such key": ({"key": "lpx_live_no"}, "AuthenticationError", "invalid_api_key"),
    "no scope": ({"scopes": "read"}, "PermissionDeniedError", "insufficient_scope"),
    "no such model": ({"model": "nothing"}, "NotFoundError", "model_not_found"),
    "too large": (
        {"messages": [{"role": "user", "content": "x" * (5 << 20)}]},
        "RequestTooLargeError",
        "body_too_large",
    ),
}


@pytest.fixture(scope="module")
def reader(server: ServerUnderTest) -> Caller:
    """Whose key may only read."""
    return server.make_caller("messages-read", [Scope.ADAPTERS_READ])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_an_error_is_the_clients_own_class_and_tells_our_code(
    resident: Caller, reader: Caller, case: str, streams: bool
) -> None:
    changes, error_class, code = CASES[case]
    asked = {**ASK, **changes}
    caller = reader if asked.pop("scopes", None) else resident
    key = asked.pop("key", caller.key)
    with (
        anthropic.Anthropic(base_url=caller.url, api_key=key, max_retries=0) as asking,
        pytest.raises(getattr(anthropic, error_class, None) or anthropic.APIStatusError) as error,
    ):
        asking.messages.create(**asked, stream=streams)
    raised = error.value
    assert raised.body["error"]["code"] == code
    param = raised.body["error"]["param"]
    answer = raised.response
    check_envelope(answer, code, param)
    assert raised.request_id == answer.headers["x-request-id"]


def test_a_path_below_that_is_none_is_answered_in_the_same_shape(resident: Caller) -> None:
    answer = resident.http.post("/v1/messages/batches", json={})
    check_envelope(answer, "not_found")


def test_a_stream_that_fails_ends_with_an_error_event(resident: Caller, client: Any) -> None:
    asked = {**ASK, "max_tokens": 400, "extra_body": {**GO_ON, "deadline_ms": 30}}
    with pytest.raises(anthropic.APIStatusError) as error:
        for _ in client.messages.create(**asked, stream=True):
            pass
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["code"] == "deadline_exceeded"
    assert error.value.body["error"]["type"] == "timeout_error"


def test_a_schema_is_followed(client: Any) -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    asked = {**ASK, "max_tokens": 64, "output_config": config}
    message = client.messages.create(**asked, extra_body={"seed": 3})
    assert message.stop_reason == "end_turn"
    assert set(json.loads(message.content[0].text)) == {"sure"}


def test_the_request_is_logged_and_metered_as_every_other(resident: Caller, client: Any) -> None:
    message = client.messages.create(**ASK, extra_body=GO_ON)
    path = f"/v1/requests/{message._request_id}"
    entry = wait_for(lambda: resident.http.get(path).json().get("request"))
    assert entry["route"] == "/v1/messages"
    assert entry["status"] == 200
    assert entry["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": "unfini', {}),
        ("{a: 1}", {"INVALID_JSON": "{a: 1}"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_the_input_of_a_call_is_an_object_whatever_the_model_wrote(
    written: str, expected: dict[str, Any]
) -> None:
    blocks = MessageBlocks()
    list(blocks.push([CallOpened(0, "f"), ArgumentsText(0, written)]))
    list(blocks.finish())
    (block,) = blocks.completed
    assert block.type == "tool_use"
    assert block.input == expected
