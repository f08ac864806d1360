"""The output items of a response, and their stream events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..schemas.answers import ChatLogprob
from ..schemas.response_objects import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    Status,
)
from ..tools import answer_part
from ..tools.answer_part import AnswerPart, ArgumentsText, CallOpened, Text


class EventNumbers:
    """Creates events with consecutive numbers."""

    def __init__(self) -> None:
        self.next = 0

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        number, self.next = self.next, self.next + 1
        return ResponseEvent(kind, number, **fields)


class ResponseOutput:
    """Creates items one after another: reasoning, a text as a message, each call."""

    def __init__(self, request_id: str, numbers: EventNumbers) -> None:
        self.items: list[OutputItem] = []
        """The completed items."""
        self._request_id = request_id
        self._numbers = numbers
        self._open: _OpenReasoning | _OpenMessage | _OpenCall | None = None
        self._logprobs: list[ChatLogprob] = []
        """For tokens whose text has not arrived yet."""

    def push(
        self, parts: Sequence[AnswerPart], logprobs: Sequence[ChatLogprob]
    ) -> Iterator[ResponseEvent]:
        """`logprobs` belong to tokens of these parts, or of text that is held back."""
        self._logprobs += logprobs
        for part in parts:
            match part:
                case answer_part.ReasoningText(text):
                    yield from self._push_reasoning(text)
                case Text(text):
                    yield from self._push_text(text)
                case CallOpened():
                    yield from self.finish_item("completed")
                    self._logprobs = []
                    yield from self._begin(_OpenCall(self._item_id("fc"), part))
                case ArgumentsText(_, text):
                    assert isinstance(self._open, _OpenCall), "arguments follow their call"
                    self._open.arguments += text
                    yield self._event("function_call_arguments.delta", delta=text)

    def finish(self, status: Status) -> Iterator[ResponseEvent]:
        """The answer is complete; one without a word is an empty message."""
        if not self.items and self._open is None:
            yield from self._begin(_OpenMessage(self._item_id("msg")))
        yield from self.finish_item(status)

    def finish_item(self, status: Status) -> Iterator[ResponseEvent]:
        """End the current item, complete or not."""
        match self._open:
            case _OpenReasoning() as reasoning:
                yield self._text_event("reasoning_text.done", text=reasoning.text)
                yield self._text_event("content_part.done", part=reasoning.part)
            case _OpenMessage() as message:
                message.logprobs += self._take_logprobs()
                part, text = message.part, message.text
                yield self._text_event("output_text.done", text=text, logprobs=part.logprobs)
                yield self._text_event("content_part.done", part=part)
            case _OpenCall() as call:
                done = "function_call_arguments.done"
                yield self._event(done, name=call.name, arguments=call.arguments)
            case None:
                return
        item = self._open.item(status)
        yield self._numbers.event(
            "response.output_item.done", output_index=len(self.items), item=item
        )
        self.items.append(item)
        self._open = None

    def _push_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, _OpenReasoning):
            yield from self.finish_item("completed")
            yield from self._begin(_OpenReasoning(self._item_id("rs")))
        assert isinstance(self._open, _OpenReasoning)
        self._logprobs = []
        self._open.text += text
        yield self._text_event("reasoning_text.delta", delta=text)

    def _push_text(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, _OpenMessage):
            yield from self.finish_item("completed")
            yield from self._begin(_OpenMessage(self._item_id("msg")))
        assert isinstance(self._open, _OpenMessage)
        logprobs = self._take_logprobs()
        self._open.text += text
        self._open.logprobs += logprobs
        yield self._text_event("output_text.delta", delta=text, logprobs=logprobs)

    def _begin(self, item: _OpenReasoning | _OpenMessage | _OpenCall) -> Iterator[ResponseEvent]:
        self._open = item
        yield self._numbers.event(
            "response.output_item.added",
            output_index=len(self.items),
            item=item.item("in_progress"),
        )
        match item:
            case _OpenReasoning():
                yield self._text_event("content_part.added", part=ReasoningText(""))
            case _OpenMessage():
                yield self._text_event("content_part.added", part=OutputText(""))

    def _take_logprobs(self) -> list[ChatLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self.items)}"

    def _text_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        """About the item that is being made."""
        assert self._open is not None
        return self._numbers.event(
            f"response.{kind}", output_index=len(self.items), item_id=self._open.id, **fields
        )


class _OpenReasoning:
    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""

    @property
    def part(self) -> ReasoningText:
        return ReasoningText(self.text)

    def item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(self.id, [] if status == "in_progress" else [self.part], status)


class _OpenMessage:
    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""
        self.logprobs: list[ChatLogprob] = []

    @property
    def part(self) -> OutputText:
        return OutputText(self.text, logprobs=self.logprobs)

    def item(self, status: Status) -> MessageItem:
        content = [] if status == "in_progress" else [self.part]
        return MessageItem(self.id, content, status)


class _OpenCall:
    def __init__(self, item_id: str, opened: CallOpened) -> None:
        self.id = item_id
        self.call_id = opened.id
        self.name = opened.name
        self.arguments = ""

    def item(self, status: Status) -> FunctionCallItem:
        return FunctionCallItem(self.id, self.call_id, self.name, self.arguments, status)
