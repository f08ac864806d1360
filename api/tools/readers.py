"""Readers of outputs without calls, and of outputs that begin with reasoning."""

from __future__ import annotations

from typing import Protocol

from .answer_part import AnswerPart, ReasoningText, Text
from .reasoning import Reasoning
from .reasoning_split import Split


class Reader(Protocol):
    """Parses an output's text as it arrives."""

    @property
    def num_calls(self) -> int: ...

    @property
    def is_plain(self) -> bool:
        """All that follows is text, unchanged."""

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that are certain now."""

    def finish(self) -> list[AnswerPart]:
        """The output is complete: return what was held back."""


class TextReader:
    """Reads outputs that are text only."""

    num_calls = 0
    is_plain = True

    def push(self, text: str) -> list[AnswerPart]:
        return [Text(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


class ReasoningReader:
    """Reads the reasoning itself and passes the answer on."""

    def __init__(self, reasoning: Reasoning, answer: Reader) -> None:
        self._split = reasoning.split()
        self._is_returned = reasoning.is_returned
        self._answer = answer

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    @property
    def is_plain(self) -> bool:
        return self._split.is_answering and self._answer.is_plain

    def push(self, text: str) -> list[AnswerPart]:
        return self._parts(self._split.push(text))

    def finish(self) -> list[AnswerPart]:
        return [*self._parts(self._split.finish()), *self._answer.finish()]

    def _parts(self, split: Split) -> list[AnswerPart]:
        answer = self._answer.push(split.answer) if split.answer else []
        if split.reasoning and self._is_returned:
            return [ReasoningText(split.reasoning), *answer]
        return answer
