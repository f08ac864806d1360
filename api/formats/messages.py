"""The format of messages and their stream events, as in Anthropic's API.

A complete message is assembled from the same events, so a stream and a complete message cannot
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic_core import from_json

from ..contract.answer_model import AnswerModel
from ..contract.errors import ApiError
from ..contract.message_errors import encode_message_error
from ..http.json_response import encode_json
from ..http.sse import sse_data
from ..inference.order import Order
from ..inference.sequence_text import Delta
from ..schemas.answers import Usage
from ..schemas.message_objects import (
    AnswerBlock,
    AnswerMessage,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    BlockDelta,
    InputJsonDelta,
    MessageEvent,
    MessageUsage,
    StopDelta,
    StopReason,
    TextDelta,
    ThinkingDelta,
)
from ..tools.answer_part import AnswerPart, ArgumentsText, CallOpened, ReasoningText, Text
from ..tools.answer_plan import AnswerPlan
from ..tools.reader import Reader

INVALID_INPUT = "INVALID_JSON"
"""The key under which the input of a call is the text that the model wrote instead of an object."""


class MessagesFormat:
    """The answer of one request."""

    ending = b""
    """The last event marks the end."""
    ping = sse_data(b'{"type":"ping"}', name="ping")

    def __init__(self, order: Order, plan: AnswerPlan, usage: Usage) -> None:
        """`usage`: as far as it is known when the answer starts."""
        self._reader = plan.make_reader()
        self._blocks = MessageBlocks()
        self._started = AnswerMessage(
            f"msg_{order.request_id}", order.model.name, [], None, None, _usage(usage)
        )
        self._stop = StopDelta("end_turn", None)

    def opening(self) -> Iterator[MessageEvent]:
        yield MessageEvent("message_start", message=self._started)

    def events(self, delta: Delta) -> bytes:
        return b"".join(map(self.event, self.chunks(delta)))

    def chunks(self, delta: Delta) -> Iterator[MessageEvent]:
        yield from self._blocks.push(self._reader.push(delta.text))
        if delta.finish_reason is not None:
            yield from self._blocks.push(self._reader.finish())
            yield from self._blocks.finish()
            self._stop = StopDelta(_stop_reason(self._reader, delta), delta.stop)

    def closing(self, usage: Usage) -> Iterator[MessageEvent]:
        yield MessageEvent("message_delta", delta=self._stop, usage=_usage(usage))
        yield MessageEvent("message_stop")

    def event(self, chunk: AnswerModel) -> bytes:
        assert isinstance(chunk, MessageEvent)
        return sse_data(encode_json(chunk), name=chunk.type)

    def failure(self, error: ApiError, request_id: str) -> bytes:
        return sse_data(encode_message_error(error, request_id), name="error")

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> AnswerMessage:
        (deltas,) = choices
        for delta in deltas:
            for _ in self.chunks(delta):
                pass
        return replace(
            self._started,
            content=self._blocks.completed,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=_usage(usage),
        )


class MessageBlocks:
    """Creates blocks one after another: consecutive text is one, so is reasoning, and each call."""

    def __init__(self) -> None:
        self.completed: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        """The current block as it started."""
        self._written: list[str] = []
        """Its text, or the JSON of its input."""

    def push(self, parts: Sequence[AnswerPart]) -> Iterator[MessageEvent]:
        for part in parts:
            match part:
                case Text(text):
                    if not isinstance(self._open, AnswerText):
                        yield from self._begin(AnswerText(""))
                    yield self._add(text, TextDelta(text))
                case ReasoningText(text):
                    if not isinstance(self._open, AnswerThinking):
                        yield from self._begin(AnswerThinking(""))
                    yield self._add(text, ThinkingDelta(text))
                case CallOpened():
                    yield from self._begin(AnswerToolUse(part.id, part.name, {}))
                case ArgumentsText(_, text):
                    yield self._add(text, InputJsonDelta(text))

    def finish(self) -> Iterator[MessageEvent]:
        """End the current block, complete or not."""
        if self._open is None:
            return
        yield MessageEvent("content_block_stop", index=len(self.completed))
        self.completed.append(_completed(self._open, "".join(self._written)))
        self._open, self._written = None, []

    def _begin(self, block: AnswerBlock) -> Iterator[MessageEvent]:
        yield from self.finish()
        self._open = block
        yield MessageEvent("content_block_start", index=len(self.completed), content_block=block)

    def _add(self, text: str, delta: BlockDelta) -> MessageEvent:
        self._written.append(text)
        return MessageEvent("content_block_delta", index=len(self.completed), delta=delta)


def _completed(block: AnswerBlock, written: str) -> AnswerBlock:
    if isinstance(block, AnswerText):
        return replace(block, text=written)
    if isinstance(block, AnswerThinking):
        return replace(block, thinking=written)
    return replace(block, input=_input(written))


def _input(written: str) -> dict[str, object]:
    """The input of a call; no text is no input. Of JSON that was cut off, it is what is complete,
    as Anthropic's client reads a stream. What is no object is its one value."""
    try:
        read = from_json(written or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {INVALID_INPUT: written}


def _stop_reason(reader: Reader, delta: Delta) -> StopReason:
    if delta.finish_reason == "length":
        return "max_tokens"
    if reader.num_calls:
        return "tool_use"
    return "end_turn" if delta.stop is None else "stop_sequence"


def _usage(usage: Usage) -> MessageUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - num_cached, num_cached, usage.completion_tokens)
