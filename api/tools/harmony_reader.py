"""Reads outputs in harmony: reasoning, text and calls by their channels."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto

from .answer_part import AnswerPart, ArgumentsText, CallOpened, ReasoningText, Text
from .harmony import MESSAGE, HarmonyEvent, HarmonyMessages, MessageOpened, MessageText
from .reasoning import Reasoning
from .reasoning_format import Beginning

FUNCTIONS = "functions."


class _Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyReader:
    """The analysis channel is reasoning, and the others are text: also the commentary that
    introduces calls. Messages of one kind are separated by a line break. A call of a function that
    is not allowed is text, with its header."""

    is_plain = False

    def __init__(self, reasoning: Reasoning, names: Collection[str] = ()) -> None:
        self.num_calls = 0
        is_continued = reasoning.beginning is Beginning.ANSWER
        self._messages = HarmonyMessages(is_continued=is_continued)
        self._is_returned = reasoning.is_returned
        self._names = names
        self._kind = _Kind.TEXT
        self._before: dict[_Kind, str] = {}
        """What precedes the next text of a kind that there was already."""
        self._has_arguments = True

    def push(self, text: str) -> list[AnswerPart]:
        return list(self._parts(self._messages.push(text)))

    def finish(self) -> list[AnswerPart]:
        return [*self._parts(self._messages.finish()), *self._end_call()]

    def _parts(self, events: list[HarmonyEvent]) -> Iterator[AnswerPart]:
        for event in events:
            match event:
                case MessageOpened():
                    yield from self._open(event)
                case MessageText(text):
                    yield from self._say(text)
                case _:
                    yield from self._end_call()

    def _open(self, message: MessageOpened) -> Iterator[AnswerPart]:
        name = message.recipient.removeprefix(FUNCTIONS)
        if message.recipient and name in self._names:
            self._kind, self._has_arguments = _Kind.CALL, False
            self.num_calls += 1
            yield CallOpened(self.num_calls - 1, name)
            return
        self._kind = _Kind.REASONING if message.is_reasoning else _Kind.TEXT
        if self._kind in self._before:
            self._before[self._kind] = "\n"
        if message.recipient:
            yield from self._say(message.header + MESSAGE)

    def _say(self, text: str) -> Iterator[AnswerPart]:
        if self._kind is _Kind.CALL:
            self._has_arguments = self._has_arguments or not text.isspace()
            yield ArgumentsText(self.num_calls - 1, text)
            return
        text = self._before.get(self._kind, "") + text
        self._before[self._kind] = ""
        if self._kind is _Kind.TEXT:
            yield Text(text)
        elif self._is_returned:
            yield ReasoningText(text)

    def _end_call(self) -> Iterator[AnswerPart]:
        """A call without arguments has none."""
        if not self._has_arguments:
            self._has_arguments = True
            yield ArgumentsText(self.num_calls - 1, "{}")
