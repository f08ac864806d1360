"""The content of samples: what a chat template was given, and what the model answered."""

from __future__ import annotations

import json

import pytest

from loraplex.api.samples.content import ChatContent, CompletionContent
from loraplex.api.schemas.chat import ChatBody
from loraplex.api.tools.answer_part import (
    AnswerPart,
    ArgumentsText,
    CallOpened,
    ReasoningText,
    Text,
)
from loraplex.api.tools.readers import TextReader
from loraplex.engine.tuning.lines import Conversation, read_example

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


class FixedReader:
    """Finds these parts, whatever the text."""

    def __init__(self, *parts: AnswerPart) -> None:
        self._parts = list(parts)

    num_calls = 0
    is_plain = False

    def push(self, text: str) -> list[AnswerPart]:
        return self._parts

    def finish(self) -> list[AnswerPart]:
        return []


def test_a_conversation_is_written_as_it_was_sent() -> None:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Tromsø"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "content": "Snow", "tool_call_id": "call-1"},
    ]
    body = ChatBody.model_validate({"model": "bot", "messages": messages, "tools": [WEATHER]})
    content = ChatContent(body.conversation(), body.tool_use, TextReader)
    answered = content.answered("It snows.")
    assert answered.content == {
        "messages": messages,
        "tools": [WEATHER],
        "answer": {"role": "assistant", "content": "It snows."},
    }
    assert not answered.has_calls


def test_reasoning_text_and_calls_of_an_answer_are_told_apart() -> None:
    reader = FixedReader(
        *(ReasoningText("First "), ReasoningText("look."), Text("One "), Text("moment")),
        *(CallOpened(0, "weather", "a"), ArgumentsText(0, '{"x"'), CallOpened(1, "time", "b")),
        *(ArgumentsText(1, "{}"), ArgumentsText(0, ": 1}")),
    )
    answered = ChatContent([], None, lambda: reader).answered("")
    answer = answered.content["answer"]
    assert answered.has_calls
    assert (answer["content"], answer["reasoning_content"]) == ("One moment", "First look.")
    called = {call["id"]: call["function"] for call in answer["tool_calls"]}
    assert called["b"] == {"name": "time", "arguments": "{}"}
    assert json.loads(called["a"]["arguments"]) == {"x": 1}
    example = read_example(json.dumps({"messages": [answer]}).encode())
    assert isinstance(example, Conversation), "training reads it"


@pytest.mark.parametrize(
    ("parts", "content"), [((), ""), ((CallOpened(0, "f", "a"), ArgumentsText(0, "{}")), None)]
)
def test_an_answer_without_text_is_empty_and_one_of_calls_has_none(
    parts: tuple[AnswerPart, ...], content: str | None
) -> None:
    answered = ChatContent([], None, lambda: FixedReader(*parts)).answered("")
    assert answered.content["answer"]["content"] == content


def test_a_completion_is_its_prompt_and_its_text() -> None:
    assert CompletionContent("Once").answered(" upon") == (
        {"prompt": "Once", "completion": " upon"},
        False,
    )
