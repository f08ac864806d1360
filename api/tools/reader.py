"""What reads the text of an output."""

from __future__ import annotations

from typing import Protocol

from .answer_part import AnswerPart


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
