"""Converts a Python literal to JSON while it arrives."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum, auto

from .argument_text import is_json

_MAX_DEPTH = 64
_MAX_SCALAR_CHARACTERS = 400
_BLANKS = frozenset(" \t\r\n")
_SCALAR_ENDS = _BLANKS | frozenset(",:)]}")
_CLOSINGS: Mapping[str, str] = {"[": "]", "{": "}"}
_WORDS: Mapping[str, str] = {
    **{"True": "true", "False": "false", "None": "null"},
    **{"true": "true", "false": "false", "null": "null"},
}
"""Models that learned both languages write JSON's words too."""
_ESCAPES: Mapping[str, str] = {
    **{"\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""},
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
}
"""What may follow a backslash, and the characters that both stand for; a slash as in JSON."""
_NUM_HEX_DIGITS: Mapping[str, int] = {"x": 2, "u": 4, "U": 8}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_OCTAL_DIGITS = frozenset("01234567")
_MAX_OCTAL_DIGITS = 3


class _Expects(Enum):
    VALUE = auto()
    KEY = auto()
    COLON = auto()
    COMMA = auto()
    """Or the end of the list or dictionary."""


class PythonLiteral:
    """Reads a string, number, boolean, None, list, or dictionary whose keys are strings.

    Strings are given as they arrive, numbers and words when they are complete. Anything else is no
    literal: expressions, tuples, prefixed and adjacent strings. Nothing is evaluated.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self.is_behind = False
        """Once it is done: the last character follows the literal."""
        self._expects = _Expects.VALUE
        self._closings: list[str] = []
        """The characters that end the open lists and dictionaries."""
        self._is_first = True
        """No item of the innermost list or dictionary was read."""
        self._quote = ""
        self._escape = ""
        self._scalar = ""

    def push(self, char: str) -> str:
        """Consume a character; returns the JSON that is now certain."""
        if self._quote:
            return self._push_in_string(char)
        if self._scalar:
            return self._push_in_scalar(char)
        return "" if char in _BLANKS else self._push_between(char)

    def _push_between(self, char: str) -> str:
        closing = self._closings[-1] if self._closings else ""
        match self._expects:
            case _Expects.COLON if char == ":":
                self._expects = _Expects.VALUE
                return ": "
            case _Expects.COMMA if char == ",":
                self._expects = _Expects.KEY if closing == "}" else _Expects.VALUE
                return ""
            case _Expects.COMMA if char == closing:
                return self._close()
            case _Expects.KEY | _Expects.VALUE if char == closing and self._may_close:
                return self._close()
            case _Expects.KEY if char in "'\"":
                self._quote = char
                return self._separator() + '"'
            case _Expects.VALUE:
                return self._begin_value(char)
        self.is_broken = True
        return ""

    @property
    def _may_close(self) -> bool:
        """At the start of a list or dictionary, and after a comma; not before a key's value."""
        return self._expects is _Expects.KEY or self._closings[-1] == "]"

    def _separator(self) -> str:
        separator = "" if self._is_first else ", "
        self._is_first = False
        return separator

    def _begin_value(self, char: str) -> str:
        is_item = bool(self._closings) and self._closings[-1] == "]"
        separator = self._separator() if is_item else ""
        if char in _CLOSINGS:
            self._closings.append(_CLOSINGS[char])
            self.is_broken = len(self._closings) > _MAX_DEPTH
            self._expects = _Expects.KEY if char == "{" else _Expects.VALUE
            self._is_first = True
            return separator + char
        if char in "'\"":
            self._quote = char
            return separator + '"'
        self._scalar = char
        self.is_broken = char in _SCALAR_ENDS
        return separator

    def _close(self) -> str:
        closing = self._closings.pop()
        self._is_first = False
        self._end_value()
        return closing

    def _end_value(self) -> None:
        self._expects = _Expects.COMMA
        self.is_done = not self._closings

    def _push_in_scalar(self, char: str) -> str:
        if char not in _SCALAR_ENDS:
            self._scalar += char
            self.is_broken = len(self._scalar) > _MAX_SCALAR_CHARACTERS
            return ""
        scalar, self._scalar = _json_of_scalar(self._scalar), ""
        if scalar is None:
            self.is_broken = True
            return ""
        self._end_value()
        if self.is_done:
            self.is_behind = True
            return scalar
        return scalar + self.push(char)

    def _push_in_string(self, char: str) -> str:
        if self._escape:
            return self._push_in_escape(char)
        if char == "\\":
            self._escape = char
            return ""
        if char != self._quote:
            return _within_string(char)
        self._quote = ""
        if self._expects is _Expects.KEY:
            self._expects = _Expects.COLON
        else:
            self._end_value()
        return '"'

    def _push_in_escape(self, char: str) -> str:
        """Escapes that Python does not know stand for themselves."""
        kind = self._escape[1:2] or char
        if kind in _OCTAL_DIGITS:
            return self._push_in_octal(char)
        if kind in _NUM_HEX_DIGITS:
            return self._push_in_hex(kind, char)
        self._escape = ""
        return _within_string(_ESCAPES.get(char, "\\" + char))

    def _push_in_octal(self, char: str) -> str:
        if char in _OCTAL_DIGITS and len(self._escape) <= _MAX_OCTAL_DIGITS:
            self._escape += char
            return ""
        code, self._escape = self._escape[1:], ""
        return _within_string(chr(int(code, 8))) + self._push_in_string(char)

    def _push_in_hex(self, kind: str, char: str) -> str:
        self._escape += char
        code = self._escape[2:]
        if not _HEX_DIGITS.issuperset(code):
            self.is_broken = True
        elif len(code) == _NUM_HEX_DIGITS[kind]:
            self._escape = ""
            return self._character(kind, code)
        return ""

    def _character(self, kind: str, code: str) -> str:
        if kind == "u":
            # The same in JSON, where two of them may be one character.
            return f"\\u{code}"
        try:
            return _within_string(chr(int(code, 16)))
        except ValueError:
            self.is_broken = True
            return ""


def _json_of_scalar(text: str) -> str | None:
    """A number or word as JSON; None if it is neither."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or text.strip("+-").replace("_", "").isdecimal():
        # Integers do not begin with zeros.
        return None
    return text if is_json(text) else json.dumps(number)


def _within_string(text: str) -> str:
    """A text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
