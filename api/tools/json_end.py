"""Detects the end of a JSON value in text that arrives character by character."""

from __future__ import annotations

from enum import Enum

_SCALAR_ENDS = frozenset(",}] \t\r\n")


class Place(Enum):
    """The lexical context of a character."""

    INSIDE = 1
    LAST = 2
    """The last character of the value."""
    BEHIND = 3
    """The value ended before it."""


class JsonEnd:
    """Follows one value without validating it: invalid JSON may end anywhere."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False

    def push(self, char: str) -> Place:
        if self._in_string:
            return self._push_in_string(char)
        is_first, self._has_begun = not self._has_begun, True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif not self._depth and not is_first and char in _SCALAR_ENDS:
            return Place.BEHIND
        elif char in "}]":
            self._depth -= 1
            return Place.INSIDE if self._depth > 0 else Place.LAST
        return Place.INSIDE

    def _push_in_string(self, char: str) -> Place:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return Place.INSIDE if self._depth else Place.LAST
        return Place.INSIDE
