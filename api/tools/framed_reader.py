"""Reads answers that the model writes between markers."""

from __future__ import annotations

from .answer_part import AnswerPart
from .marker import num_begun
from .reader import Reader
from .reasoning_format import Frame


class FramedReader:
    """Removes a frame around the answer, and blanks within it at both ends, and passes the rest on.

    The opening marker counts at the beginning of the answer only, and the closing one at its end:
    within the answer both are text. An answer without the opening marker is passed on unchanged.
    """

    def __init__(self, frame: Frame, answer: Reader) -> None:
        self._frame = frame
        self._answer = answer
        self._pending = ""
        self._is_begun = False
        """It is known whether there is a frame."""
        self._is_framed = False
        self._is_blank = True
        """Only blanks followed the opening marker."""

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    @property
    def is_plain(self) -> bool:
        return self._is_begun and not self._is_framed and self._answer.is_plain

    def push(self, text: str) -> list[AnswerPart]:
        self._pending += text
        if not self._is_begun:
            self._read_beginning()
        if not self._is_begun:
            return []
        return self._pass_on(self._num_certain() if self._is_framed else len(self._pending))

    def finish(self) -> list[AnswerPart]:
        body = self._pending.rstrip()
        if self._is_framed and body.endswith(self._frame.closing):
            self._pending = body.removesuffix(self._frame.closing).rstrip()
        return [*self._pass_on(len(self._pending)), *self._answer.finish()]

    def _read_beginning(self) -> None:
        begun, opening = self._pending.lstrip(), self._frame.opening
        if begun.startswith(opening):
            self._is_begun = self._is_framed = True
            self._pending = begun.removeprefix(opening)
        elif not opening.startswith(begun):
            self._is_begun = True

    def _num_certain(self) -> int:
        """The characters before a possible end of the frame and the blanks around it."""
        if self._is_blank:
            self._pending = self._pending.lstrip()
            self._is_blank = not self._pending
        closing, body = self._frame.closing, self._pending.rstrip()
        if body.endswith(closing):
            return len(body.removesuffix(closing).rstrip())
        begun = num_begun(self._pending, closing)
        return len(self._pending[: len(self._pending) - begun].rstrip())

    def _pass_on(self, num_chars: int) -> list[AnswerPart]:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return self._answer.push(text) if text else []
