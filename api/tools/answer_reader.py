"""Parses an answer's text into text and function calls while it arrives."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto

from .answer_part import AnswerPart, ArgumentsText, CallOpened, Text, new_call_id
from .call_scanner import CallScanner
from .call_spelling import Schemas
from .marker import num_begun
from .tool_format import ToolFormat


class _Mode(Enum):
    START = auto()
    """Only blanks have arrived: a call without opening may follow."""
    TEXT = auto()
    LEAD_IN = auto()
    """After an opening: a call starts."""
    CALL = auto()
    AFTER = auto()
    """After a call: separators between calls are not text."""


class AnswerReader:
    """Parses one answer in a format.

    Blanks between text and calls belong to neither. Text that only looks like a call, or calls a
    function that is not allowed, is returned unchanged. The concatenated parts do not depend on how
    the text was split.
    """

    is_plain = False

    def __init__(
        self, written: ToolFormat, names: Collection[str], schemas: Schemas | None = None
    ) -> None:
        """`schemas`: those of the functions' arguments, for formats that write them as text."""
        self.num_calls = 0
        self._schemas = schemas or {}
        self._format = written
        self._names = names
        self._mode = _Mode.START if written.bare else _Mode.TEXT
        self._pending = ""
        """Received text that is neither emitted nor skipped."""
        self._cursor = 0
        """The part of it that was already scanned as a possible call."""
        self._scanner: CallScanner | None = None

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that are certain now."""
        self._pending += text
        parts: list[AnswerPart] = []
        while True:
            before = (self._mode, self._cursor, len(self._pending))
            parts += self._read()
            if before == (self._mode, self._cursor, len(self._pending)):
                return parts

    def finish(self) -> list[AnswerPart]:
        """The answer is complete: what is not the end of a call is text."""
        pending, self._pending = self._pending, ""
        is_in_call = self._scanner is not None and self._scanner.name is not None
        is_between = self.num_calls > 0 and not pending.strip()
        if not pending or is_in_call or is_between or self._mode is _Mode.AFTER:
            return []
        return [Text(pending)]

    def _read(self) -> Iterator[AnswerPart]:
        match self._mode:
            case _Mode.START:
                return self._read_start()
            case _Mode.TEXT:
                return self._read_text()
            case _Mode.LEAD_IN:
                return self._read_lead_in()
            case _Mode.CALL:
                return self._read_call()
            case _Mode.AFTER:
                return self._read_after()

    def _read_start(self) -> Iterator[AnswerPart]:
        first = self._skip_blanks()
        if self._format.bare is not None and first == self._format.bare.text:
            self._mode = _Mode.LEAD_IN
        elif first:
            self._mode, self._cursor = _Mode.TEXT, 0
        yield from ()

    def _read_text(self) -> Iterator[AnswerPart]:
        opening = self._format.opening
        found = self._pending.find(opening)
        end = found if found >= 0 else len(self._pending) - num_begun(self._pending, opening)
        certain = self._pending[:end].rstrip()
        if certain:
            yield Text(certain)
        self._pass_over(len(certain))
        if found >= 0:
            self._mode = _Mode.LEAD_IN
            self._cursor = end - len(certain) + len(opening)

    def _read_lead_in(self) -> Iterator[AnswerPart]:
        first = self._skip_blanks()
        rest = self._pending[self._cursor :]
        lead_in = next((text for text in self._format.lead_ins if rest.startswith(text)), None)
        if lead_in is not None:
            self._cursor += len(lead_in)
        elif any(text.startswith(rest) for text in self._format.lead_ins):
            return
        elif first and not self._begin_call(first):
            yield from self._give_up()

    def _read_call(self) -> Iterator[AnswerPart]:
        scanner = self._scanner
        assert scanner is not None
        was_opened = scanner.name is not None
        arguments: list[str] = []
        while self._cursor < len(self._pending) and not (scanner.is_done or scanner.is_broken):
            arguments.append(scanner.push(self._pending[self._cursor]))
            self._cursor += 1
        if scanner.name is None:
            if scanner.is_broken:
                yield from self._give_up()
            return
        self._pass_over(self._cursor)
        if not was_opened:
            yield CallOpened(self.num_calls, scanner.name, scanner.id or new_call_id())
            self.num_calls += 1
        if written := "".join(arguments):
            yield ArgumentsText(self.num_calls - 1, written)
        if scanner.is_done or scanner.is_broken:
            self._pending = scanner.unread + self._pending
            self._mode = _Mode.AFTER if scanner.is_done else _Mode.TEXT
            self._scanner = None

    def _read_after(self) -> Iterator[AnswerPart]:
        self._skip_blanks()
        rest = self._pending[self._cursor :]
        opening, reopening = self._format.opening, self._format.reopening
        separator = next((s for s in self._format.separators if rest.startswith(s)), None)
        if separator is not None:
            self._pass_over(self._cursor + len(separator))
        elif rest.startswith(opening):
            self._mode = _Mode.LEAD_IN
            self._cursor += len(opening)
        elif reopening is not None and rest.startswith(reopening):
            self._mode = _Mode.LEAD_IN
        elif rest and not any(
            m.startswith(rest) for m in (opening, reopening or "", *self._format.separators)
        ):
            self._pass_over(self._cursor)
            self._mode = _Mode.TEXT
        yield from ()

    def _skip_blanks(self) -> str:
        """The next character that is not blank, at the cursor; empty if there is none yet."""
        rest = self._pending[self._cursor :]
        self._cursor += len(rest) - len(rest.lstrip())
        return self._pending[self._cursor : self._cursor + 1]

    def _begin_call(self, first: str) -> bool:
        self._scanner = self._format.scanner(first, self._names, self._schemas)
        if self._scanner is not None:
            self._mode = _Mode.CALL
        return self._scanner is not None

    def _give_up(self) -> Iterator[AnswerPart]:
        """The scanned text is not a call."""
        read = self._pending[: self._cursor]
        self._pass_over(self._cursor)
        self._mode, self._scanner = _Mode.TEXT, None
        yield Text(read)

    def _pass_over(self, num_chars: int) -> None:
        self._pending = self._pending[num_chars:]
        self._cursor = 0
