"""Counts the tokens of one sequence's reasoning."""

from __future__ import annotations

from typing import Protocol

from ..tools.harmony import HarmonyMessages, MessageClosed, MessageOpened
from ..tools.reasoning import Reasoning
from ..tools.reasoning_format import Beginning


class ReasoningCount(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def is_final(self) -> bool:
        """No token that follows is counted."""

    @property
    def is_in_answer(self) -> bool:
        """The last token belongs to the answer."""

    def push(self, text: str) -> None:
        """Take the text of the next token, which is empty as long as it is part of a character."""


def count_reasoning(reasoning: Reasoning) -> ReasoningCount:
    if reasoning.format.has_channels:
        return ChannelCount(reasoning)
    return MarkerCount(reasoning)


class MarkerCount:
    """The tokens up to the one that completes the closing marker, markers included.

    A sequence that does not begin with reasoning has none; one without a closing marker consists of
    them.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._split = reasoning.split()
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        return self._num_read if self._split.has_reasoning else 0

    @property
    def is_final(self) -> bool:
        return self._split.is_over

    @property
    def is_in_answer(self) -> bool:
        return self._split.is_over

    def push(self, text: str) -> None:
        if not self._split.is_over:
            self._num_read += 1
            self._split.push(text)


class ChannelCount:
    """The tokens of the messages in the channel of the reasoning, markers included."""

    is_final = False

    def __init__(self, reasoning: Reasoning) -> None:
        is_continued = reasoning.beginning is Beginning.ANSWER
        self._messages = HarmonyMessages(is_continued=is_continued)
        self._is_reasoning = False
        self.is_in_answer = False
        self._num_closed = 0
        self._num_of_message = 0
        """The tokens of the message that is being read."""

    @property
    def num_tokens(self) -> int:
        return self._num_closed + (self._num_of_message if self._is_reasoning else 0)

    def push(self, text: str) -> None:
        self._num_of_message += 1
        for event in self._messages.push(text):
            match event:
                case MessageOpened():
                    self._is_reasoning = event.is_reasoning
                    self.is_in_answer = not event.is_reasoning
                case MessageClosed():
                    self._num_closed = self.num_tokens
                    self._is_reasoning, self._num_of_message = False, 0
