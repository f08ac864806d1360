"""The format of chat completions and their chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from ...engine.text.tokenizer import Tokenizer
from ..inference.order import Order
from ..inference.sequence_text import Delta
from ..schemas.answers import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from ..tools.answer_part import AnswerPart, ArgumentsText, CallOpened, ReasoningText, Text
from ..tools.answer_plan import AnswerPlan
from ..tools.reader import Reader
from .answering import PlainEvents
from .chat_logprobs import chat_logprob


class ChatFormat(PlainEvents):
    """The answers of one request."""

    def __init__(
        self, order: Order, plan: AnswerPlan, tokenizer: Tokenizer, *, streams_usage: bool
    ) -> None:
        self._id = f"chatcmpl-{order.request_id}"
        self._created = int(time.time())
        self._model = order.model.name
        self._has_logprobs = order.sampling.num_logprobs is not None
        self._may_call = plan.may_call
        self._readers = [plan.make_reader() for _ in range(order.num_choices)]
        self._tokenizer = tokenizer
        self._streams_usage = streams_usage
        super().__init__()

    def opening(self) -> Iterator[ChatChunk]:
        content = None if self._may_call else ""
        for index in range(len(self._readers)):
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content=content)))

    def is_plain(self, index: int) -> bool:
        return not self._has_logprobs and self._readers[index].is_plain

    def chunks(self, delta: Delta) -> Iterator[ChatChunk]:
        reader = self._readers[delta.index]
        deltas = [_chat_delta(part) for part in _parts(reader, delta)]
        if not deltas and (delta.logprobs or delta.finish_reason):
            deltas = [ChatDelta(content="") if delta.logprobs else ChatDelta()]
        for number, content in enumerate(deltas, start=1):
            if number < len(deltas):
                yield self._chunk(ChatChunkChoice(delta.index, content))
                continue
            reason = _finish_reason(reader, delta) if delta.finish_reason else None
            logprobs = self._logprobs([delta])
            yield self._chunk(ChatChunkChoice(delta.index, content, reason, logprobs))

    def text_chunk(self, index: int, text: str) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index, ChatDelta(content=text)))

    def closing(self, usage: Usage) -> Iterator[ChatChunk]:
        if self._streams_usage:
            yield ChatChunk(self._id, self._created, self._model, [], usage)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> ChatCompletion:
        answers = [self._choice(index, deltas) for index, deltas in enumerate(choices)]
        return ChatCompletion(self._id, self._created, self._model, answers, usage)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        reader = self._readers[index]
        message = _message(part for delta in deltas for part in _parts(reader, delta))
        reason = _finish_reason(reader, deltas[-1])
        return ChatChoice(index, message, reason, self._logprobs(deltas))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        no_usage = None if self._streams_usage else UNSET
        return ChatChunk(self._id, self._created, self._model, [choice], no_usage)

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        entries = (entry for delta in deltas for entry in delta.logprobs)
        return ChatLogprobs([chat_logprob(self._tokenizer, entry) for entry in entries])


def _parts(reader: Reader, delta: Delta) -> list[AnswerPart]:
    parts = reader.push(delta.text)
    return [*parts, *reader.finish()] if delta.finish_reason else parts


def _finish_reason(reader: Reader, delta: Delta) -> ChatFinishReason:
    if delta.finish_reason == "length":
        return "length"
    return "tool_calls" if reader.num_calls else "stop"


def _chat_delta(part: AnswerPart) -> ChatDelta:
    match part:
        case ReasoningText(text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case Text(text):
            return ChatDelta(content=text)
        case CallOpened(index, name, call_id):
            opened = ToolCallDelta(index, FunctionDelta("", name), call_id, "function")
            return ChatDelta(tool_calls=[opened])
        case ArgumentsText(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])


def _message(parts: Iterator[AnswerPart]) -> ChatMessage:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[CallOpened] = []
    arguments: list[str] = []
    for part in parts:
        match part:
            case ReasoningText(text):
                reasoning.append(text)
            case Text(text):
                texts.append(text)
            case CallOpened():
                calls.append(part)
                arguments.append("")
            case ArgumentsText(index, text):
                arguments[index] += text
    reasoned = "".join(reasoning) or UNSET
    text, made = "".join(texts), _calls(calls, arguments)
    has_other = made is not UNSET or reasoned is not UNSET
    return ChatMessage(text or None if has_other else text, reasoned, reasoned, made)


def _calls(opened: Sequence[CallOpened], arguments: Sequence[str]) -> list[ToolCall] | UnsetType:
    if not opened:
        return UNSET
    return [
        ToolCall(call.id, CalledFunction(call.name, written))
        for call, written in zip(opened, arguments, strict=True)
    ]
