"""Separates reasoning from the answer while an output arrives."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from .marker import num_begun
from .reasoning_format import Beginning, ReasoningFormat


class Split(NamedTuple):
    """The next text of an output."""

    reasoning: str
    answer: str


class _Place(Enum):
    BEGINNING = auto()
    """Only blanks and perhaps a part of the opening marker have arrived."""
    REASONING = auto()
    BETWEEN = auto()
    """After the closing marker: blanks before the answer."""
    ANSWER = auto()


class ReasoningSplit:
    """Splits one output. Markers, and blanks around the reasoning, belong to neither text.

    Reasoning can only be at the beginning: markers in the answer are text. The concatenated texts
    do not depend on the boundaries of the pieces.
    """

    def __init__(self, written: ReasoningFormat, beginning: Beginning) -> None:
        self.has_reasoning = beginning is Beginning.REASONING
        """Whether the output has begun with reasoning."""
        self._format = written
        self._place = _Place.ANSWER if beginning is Beginning.ANSWER else _Place.BEGINNING
        self._pending = ""
        """Text that is not assigned yet."""
        self._is_blank = True
        """Whether the reasoning so far is blank."""
        self._label = written.label
        """The label that may still come."""

    @property
    def is_over(self) -> bool:
        """Nothing that follows is reasoning."""
        return self._place in (_Place.BETWEEN, _Place.ANSWER)

    @property
    def is_answering(self) -> bool:
        """All that follows is the answer, unchanged."""
        return self._place is _Place.ANSWER

    def push(self, text: str) -> Split:
        """The text that is certain now."""
        self._pending += text
        if self._place is _Place.BEGINNING:
            self._read_beginning()
        reasoning = self._read_reasoning() if self._place is _Place.REASONING else ""
        if self._place is _Place.BETWEEN:
            self._pending = self._pending.lstrip()
            if self._pending:
                self._place = _Place.ANSWER
        return Split(reasoning, self._take() if self._place is _Place.ANSWER else "")

    def finish(self) -> Split:
        """The output is complete: return the text that was held back."""
        if not self.has_reasoning:
            return Split("", self._take())
        rest = self._take().rstrip()
        return Split(rest.lstrip() if self._is_blank else rest, "")

    def _read_beginning(self) -> None:
        begun, opening = self._pending.lstrip(), self._format.opening
        if begun.startswith(opening):
            self._pending = begun[len(opening) :]
            self.has_reasoning = True
        elif opening.startswith(begun):
            return
        self._place = _Place.REASONING if self.has_reasoning else _Place.ANSWER

    def _read_reasoning(self) -> str:
        if self._is_blank:
            self._pending = self._pending.lstrip()
        if self._label and not self._pass_label():
            return ""
        closing = self._format.closing
        found = self._pending.find(closing)
        end = found if found >= 0 else len(self._pending) - num_begun(self._pending, closing)
        certain = self._pending[:end].rstrip()
        self._is_blank = self._is_blank and not certain
        if found >= 0:
            self._pending = self._pending[found + len(closing) :]
            self._place = _Place.BETWEEN
        else:
            self._pending = self._pending[len(certain) :]
        return certain

    def _pass_label(self) -> bool:
        """Whether it is known that the label came or does not come."""
        if len(self._pending) < len(self._label) and self._label.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(self._label).lstrip()
        self._label = ""
        return True

    def _take(self) -> str:
        taken, self._pending = self._pending, ""
        return taken
