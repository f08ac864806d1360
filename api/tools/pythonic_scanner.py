"""Scans one function call that is written as Python does."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from .python_literal import PythonLiteral

_BLANKS = frozenset(" \t\r\n")
_NO_KEY = frozenset("()[]{},:'\"")
"""Characters that no argument's name has."""
_MAX_NAME_CHARACTERS = 256


class _Place(Enum):
    NAME = auto()
    KEY = auto()
    """Before or in the name of an argument; or the end of the call."""
    VALUE = auto()
    BEHIND = auto()
    """After an argument."""


class PythonicCallScanner:
    """`f(city="Oslo", days=3)`; gives the arguments as a JSON object. The call is opened by the
    equals sign of its first argument, or its end if it has none."""

    id: str | None = None
    unread = ""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._names = names
        self._place = _Place.NAME
        self._text = ""
        """The name that is being read."""
        self._candidate = ""
        self._value = PythonLiteral()

    def push(self, char: str) -> str:
        match self._place:
            case _Place.NAME:
                self._push_in_name(char)
                return ""
            case _Place.KEY:
                return self._push_in_key(char)
            case _Place.VALUE:
                return self._push_in_value(char)
            case _Place.BEHIND:
                return self._push_behind(char)

    def _push_in_name(self, char: str) -> None:
        if char != "(":
            self._add(char)
            return
        self._candidate, self._text = self._text.strip(), ""
        self.is_broken = self._candidate not in self._names
        self._place = _Place.KEY

    def _push_in_key(self, char: str) -> str:
        if char == ")" and not self._text.strip():
            return self._finish()
        if char != "=":
            self.is_broken = char in _NO_KEY
            self._add(char)
            return ""
        key, self._text = self._text.strip(), ""
        if not key:
            self.is_broken = True
            return ""
        self._place, self._value = _Place.VALUE, PythonLiteral()
        return f"{self._before_key()}{json.dumps(key, ensure_ascii=False)}: "

    def _before_key(self) -> str:
        if self.name is None:
            self.name = self._candidate
            return "{"
        return ", "

    def _push_in_value(self, char: str) -> str:
        given = self._value.push(char)
        self.is_broken = self._value.is_broken
        if self._value.is_done:
            self._place = _Place.BEHIND
            if self._value.is_behind:
                given += self._push_behind(char)
        return given

    def _push_behind(self, char: str) -> str:
        if char == ")":
            return self._finish()
        if char == ",":
            self._place = _Place.KEY
        elif char not in _BLANKS:
            self.is_broken = True
        return ""

    def _finish(self) -> str:
        self.is_done = True
        if self.name is None:
            self.name = self._candidate
            return "{}"
        return "}"

    def _add(self, char: str) -> None:
        self._text += char
        if len(self._text) > _MAX_NAME_CHARACTERS:
            self.is_broken = True
