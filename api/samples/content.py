"""The content of samples: the prompt and the answer of a request, as JSON.

    {"messages": [...], "tools": [...], "answer": {"role": "assistant", ...}}
    {"prompt": "...", "completion": "..."}

Messages, tools and calls are written as in chat completions, whatever the API of the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...platform.base import JsonObject
from ...platform.samples.models import SampleKind
from ..tools.answer_part import AnswerPart, ArgumentsText, CallOpened, ReasoningText, Text
from ..tools.conversation import ChatMessage, PastCall
from ..tools.reader import Reader
from ..tools.tool import Tool, ToolUse


class Answered(NamedTuple):
    """The content of a sample, and whether its answer calls functions."""

    content: JsonObject
    has_calls: bool


class Content(Protocol):
    """The prompt of a request that is to be kept."""

    @property
    def kind(self) -> SampleKind: ...

    def answered(self, text: str) -> Answered:
        """The prompt together with its answer, the text that the model wrote."""


@dataclass(frozen=True, slots=True)
class ChatContent:
    """A conversation."""

    messages: Sequence[ChatMessage]
    use: ToolUse | None
    make_reader: Callable[[], Reader]
    """Parses the answer."""

    @property
    def kind(self) -> SampleKind:
        return SampleKind.CHAT

    def answered(self, text: str) -> Answered:
        reader = self.make_reader()
        answer = _answer([*reader.push(text), *reader.finish()])
        content: JsonObject = {"messages": [_message(each) for each in self.messages]}
        if self.use is not None:
            content["tools"] = [_tool(each) for each in self.use.tools]
        return Answered({**content, "answer": answer}, "tool_calls" in answer)


@dataclass(frozen=True, slots=True)
class CompletionContent:
    """A plain text."""

    prompt: str

    @property
    def kind(self) -> SampleKind:
        return SampleKind.COMPLETION

    def answered(self, text: str) -> Answered:
        return Answered({"prompt": self.prompt, "completion": text}, has_calls=False)


def _message(message: ChatMessage) -> JsonObject:
    written: JsonObject = {"role": message.role, "content": message.text}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["tool_calls"] = [_past_call(call) for call in message.calls]
    if message.call_id is not None:
        written["tool_call_id"] = message.call_id
    return written


def _past_call(call: PastCall) -> JsonObject:
    return _call(call.id, call.name, json.dumps(dict(call.arguments), ensure_ascii=False))


def _call(call_id: str, name: str, arguments: str) -> JsonObject:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _tool(tool: Tool) -> JsonObject:
    function: JsonObject = {"name": tool.name, "parameters": dict(tool.parameters)}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.is_strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _answer(parts: Iterable[AnswerPart]) -> JsonObject:
    reasoning = text = ""
    opened: list[CallOpened] = []
    arguments: list[str] = []
    for part in parts:
        match part:
            case ReasoningText(piece):
                reasoning += piece
            case Text(piece):
                text += piece
            case CallOpened():
                opened.append(part)
                arguments.append("")
            case ArgumentsText(index, piece):
                arguments[index] += piece
    answer: JsonObject = {"role": "assistant", "content": text if text or not opened else None}
    if reasoning:
        answer["reasoning_content"] = reasoning
    if opened:
        pairs = zip(opened, arguments, strict=True)
        answer["tool_calls"] = [_call(call.id, call.name, written) for call, written in pairs]
    return answer
