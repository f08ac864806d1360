"""Lines of training data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.engine.tuning.errors import InvalidTrainingData
from loraplex.engine.tuning.lines import Completion, Conversation, read_example, read_preference

USER = {"role": "user", "content": "Which city?"}
ANSWER = {"role": "assistant", "content": "Paris."}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "function": {"name": "find", "arguments": '{"city": "Paris"}'}}],
}
RESULT = {"role": "tool", "content": "found", "tool_call_id": "c1"}


def encoded(**line: Any) -> bytes:
    return json.dumps(line).encode()


def conversation(*messages: dict[str, Any], **line: Any) -> Conversation:
    read = read_example(encoded(messages=messages, **line))
    assert isinstance(read, Conversation)
    return read


def test_assistant_messages_are_trained() -> None:
    assert conversation(USER, ANSWER, USER, ANSWER).trained == {1, 3}


def test_an_assistant_message_of_weight_0_is_not_trained() -> None:
    read = conversation(USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1})
    assert read.trained == {3}
    assert "weight" not in read.messages[1]


def test_parts_of_text_are_one_text_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    read = conversation({"role": "developer", "content": parts}, USER, ANSWER)
    assert read.messages[0] == {"role": "system", "content": "one\ntwo"}


def test_calls_are_given_to_templates_as_requests_give_them() -> None:
    tools = [{"type": "function", "function": {"name": "find"}}]
    read = conversation(USER, CALL, RESULT, ANSWER, tools=tools, parallel_tool_calls=False)
    function = {"name": "find", "arguments": {"city": "Paris"}}
    assert read.tools == tools
    assert read.messages[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": function}
    ]
    assert read.messages[2] == {**RESULT, "name": "find"}
    assert read.trained == {1, 3}


def test_a_prompt_and_its_completion_are_read() -> None:
    assert read_example(encoded(prompt="", completion="x")) == Completion("", "x")


def test_a_preference_trains_the_ends_alone() -> None:
    other = {"role": "assistant", "content": "London."}
    line = encoded(
        input={"messages": [USER, ANSWER, USER]},
        preferred_output=[ANSWER],
        non_preferred_output=[other],
    )
    pair = read_preference(line)
    assert pair.preferred.trained == pair.non_preferred.trained == {3}
    assert pair.preferred.messages[3]["content"] == "Paris."
    assert pair.non_preferred.messages[3]["content"] == "London."


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not a JSON object"),
        (b"[1]", "Expected `object`"),
        (b'{"prompt": "\xff", "completion": "x"}', "UTF-8"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "object"),
        (encoded(prompt="x"), "completion"),
        (encoded(prompt="x", completion=""), "empty"),
        (encoded(messages=[]), "empty"),
        (encoded(messages=[USER]), "no assistant message is trained"),
        (encoded(messages=[USER, {**ANSWER, "weight": 0}]), "no assistant message is trained"),
        (encoded(messages=[USER, {**ANSWER, "weight": 2}]), "weight"),
        (encoded(messages=[{**USER, "weight": 1}, ANSWER]), "weight"),
        (encoded(messages=[{"role": "robot", "content": "x"}, ANSWER]), "role"),
        (encoded(messages=[USER, {"role": "assistant"}]), "no content"),
        (encoded(messages=[USER, ANSWER], mesages=[]), "mesages"),
        (encoded(messages=[{**USER, "contents": "x"}, ANSWER]), "contents"),
        (encoded(messages=[{**USER, "tool_call_id": "c1"}, ANSWER]), "tool_call_id"),
        (
            encoded(
                messages=[
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                    ANSWER,
                ]
            ),
            "content",
        ),
        (
            encoded(
                messages=[
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    },
                ]
            ),
            "not a JSON object",
        ),
    ],
)
def test_a_wrong_line_is_refused_with_the_reason(line: bytes, reason: str) -> None:
    with pytest.raises(InvalidTrainingData, match=reason):
        read_example(line)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input": {"messages": []}}, "empty"),
        ({"preferred_output": []}, "preferred_output"),
        ({"non_preferred_output": [USER]}, "non_preferred_output"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_preference_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    line = {
        "input": {"messages": [USER]},
        "preferred_output": [ANSWER],
        "non_preferred_output": [ANSWER],
    }
    with pytest.raises(InvalidTrainingData, match=reason):
        read_preference(encoded(**{**line, **changes}))
