"""Scans one function call incrementally.

A scanner consumes characters until it is `done` or `broken`. It is `opened` once the function is
known and its arguments have started; from then on it cannot be plain text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from .json_end import JsonEnd, Place

ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
_BLANKS = frozenset(" \t\r\n")
_MAX_HEAD_CHARACTERS = 256
"""Of a name and what surrounds it."""


class CallScanner(Protocol):
    """Reads one call."""

    name: str | None
    """Known once the call is opened."""
    id: str | None
    """The call's id as the model wrote it, once the call is opened; None: it writes none."""
    is_done: bool
    is_broken: bool
    """The scanned text is not a call of an allowed function."""
    unread: str
    """Once it is done: consumed text that follows the call."""

    def push(self, char: str) -> str:
        """Consume a character; returns the arguments that are now certain, empty before it is
        opened."""


class _Expects(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class ObjectCallScanner:
    """`{"name": "f", "arguments": {…}}`, its members in any order; others are passed over."""

    id: str | None = None
    unread = ""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._names = names
        self._candidate: str | None = None
        self._expects = _Expects.OBJECT
        self._key: str | None = None
        self._value: JsonEnd | None = None
        self._text: list[str] = []
        """The characters of the key or value that is being scanned."""
        self._arguments: list[str] = []
        """Read before the name was."""
        self._has_arguments = False

    def push(self, char: str) -> str:
        if self._value is not None:
            return self._push_in_value(self._value, char)
        if char in _BLANKS:
            return ""
        match self._expects, char:
            case (_Expects.OBJECT, "{") | (_Expects.COMMA, ","):
                self._expects = _Expects.KEY
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case ((_Expects.KEY | _Expects.COMMA), "}"):
                return self._finish()
            case _Expects.KEY, '"':
                return self._begin_value(char)
            case _Expects.VALUE, _:
                return self._begin_value(char)
            case _:
                self.is_broken = True
        return ""

    def _begin_value(self, char: str) -> str:
        self._value, self._text = JsonEnd(), []
        if self._is_of_arguments:
            if self._has_arguments or char not in '{"':
                self.is_broken = True
            self._has_arguments = True
        return self._push_in_value(self._value, char)

    @property
    def _is_of_arguments(self) -> bool:
        return self._expects is _Expects.VALUE and self._key in ARGUMENTS_KEYS

    def _push_in_value(self, value: JsonEnd, char: str) -> str:
        place = value.push(char)
        given = ""
        if place is not Place.BEHIND:
            self._text.append(char)
            if self._is_of_arguments and self._text[0] == "{":
                given = self._give(char)
        if place is not Place.INSIDE:
            self._value = None
            given += self._take_value()
        return given + (self.push(char) if place is Place.BEHIND else "")

    def _take_value(self) -> str:
        text = "".join(self._text)
        if self._expects is _Expects.KEY:
            self._key, self._expects = self._decoded(text), _Expects.COLON
            return ""
        is_packed = self._is_of_arguments and text[0] == '"'
        is_name = self._key == "name"
        self._expects = _Expects.COMMA
        if is_packed:
            return self._give(self._decoded(text) or "")
        if is_name and self._candidate is None:
            return self._take_name(self._decoded(text))
        return ""

    def _take_name(self, name: str | None) -> str:
        if name not in self._names:
            self.is_broken = True
            return ""
        self._candidate = name
        return self._give("")

    def _give(self, arguments: str) -> str:
        """The arguments that may be given out: none as long as the function is not known."""
        self._arguments.append(arguments)
        if self._candidate is None or not self._has_arguments:
            return ""
        self.name = self._candidate
        given, self._arguments = self._arguments, []
        return "".join(given)

    def _finish(self) -> str:
        if self._candidate is None:
            self.is_broken = True
            return ""
        self.is_done = True
        if self._has_arguments:
            return ""
        self._has_arguments = True
        return self._give("{}")

    def _decoded(self, text: str) -> str | None:
        try:
            decoded = json.loads(text, strict=False)
        except ValueError:
            decoded = None
        if not isinstance(decoded, str):
            self.is_broken = True
            return None
        return decoded


class NamedCallScanner:
    """The name after `before` and up to `name_end`, and then the arguments as an object, such as
    `f[ARGS]{…}`. Between the two may be more, such as `[CALL_ID]` and an id."""

    id: str | None = None
    unread = ""

    def __init__(self, names: Collection[str], *, before: str = "", name_end: str = "[") -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._names = names
        self._before = before
        self._name_end = name_end
        self._head = ""
        self._value: JsonEnd | None = None

    def push(self, char: str) -> str:
        if self._value is None and char != "{":
            self._head += char
            is_begun = self._head.startswith(self._before[: len(self._head)])
            self.is_broken = not is_begun or len(self._head) > _MAX_HEAD_CHARACTERS
            return ""
        if self._value is None:
            self._value = JsonEnd()
            self._read_head()
            if self.name is None:
                self.is_broken = True
                return ""
        self.is_done = self._value.push(char) is Place.LAST
        return char

    def _read_head(self) -> None:
        """Finds the name, if this is a call of an allowed function."""
        name = self._head.removeprefix(self._before).partition(self._name_end)[0].strip()
        if name in self._names and self._head.startswith(self._before):
            self.name = name


class NumberedCallScanner(NamedCallScanner):
    """`functions.f:0`, a marker, and the arguments as an object."""

    def __init__(
        self, names: Collection[str], *, before: str, number_start: str, after: str
    ) -> None:
        super().__init__(names)
        self._optional_before = before
        self._number_start = number_start
        self._after = after

    def _read_head(self) -> None:
        head, after, rest = self._head.partition(self._after)
        written = head.strip()
        before, _, number = written.rpartition(self._number_start)
        name = before.removeprefix(self._optional_before)
        if name in self._names and number.isdecimal() and after and not rest.strip():
            self.name, self.id = name, written
