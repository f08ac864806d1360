"""Readers of outputs without calls, and of outputs that begin with reasoning."""

from __future__ import annotations

from .answer_part import AnswerPart, ReasoningText, Text
from .framed_reader import FramedReader
from .marker import num_begun
from .reader import Reader
from .reasoning import Reasoning
from .reasoning_format import Beginning
from .reasoning_split import Split


class TextReader:
    """Reads outputs that are text only."""

    num_calls = 0
    is_plain = True

    def push(self, text: str) -> list[AnswerPart]:
        return [Text(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


def read_after_reasoning(reasoning: Reasoning, answer: Reader) -> Reader:
    """The reader of outputs that may begin with reasoning. `answer` reads what follows it."""
    if reasoning.format.frame is not None:
        answer = FramedReader(reasoning.format.frame, answer)
    if reasoning.format.is_kept and reasoning.is_returned:
        return KeptReasoningReader(reasoning, answer)
    return ReasoningReader(reasoning, answer)


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


class KeptReasoningReader:
    """Returns the reasoning as text, with its markers, and passes the answer on. The opening marker
    is added if the prompt contains it."""

    is_plain = False

    def __init__(self, reasoning: Reasoning, answer: Reader) -> None:
        self._split = reasoning.split()
        self._closing = reasoning.format.closing
        self._answer = answer
        is_opened = reasoning.beginning is Beginning.REASONING
        self._pending = reasoning.format.opening if is_opened else ""

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    def push(self, text: str) -> list[AnswerPart]:
        if self._split.is_over:
            return self._answer.push(text)
        self._split.push(text)
        self._pending += text
        if not self._split.has_reasoning:
            return self._answer.push(self._take()) if self._split.is_over else []
        if not self._split.is_over:
            return self._give(len(self._pending) - num_begun(self._pending, self._closing))
        end = self._pending.find(self._closing) + len(self._closing)
        return [*self._give(end), *self._answer.push(self._take())]

    def finish(self) -> list[AnswerPart]:
        rest = self._take()
        given = [Text(rest)] if rest and self._split.has_reasoning else self._answer.push(rest)
        return [*given, *self._answer.finish()]

    def _give(self, num_chars: int) -> list[AnswerPart]:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return [Text(text)] if text else []

    def _take(self) -> str:
        taken, self._pending = self._pending, ""
        return taken
