"""Scans one function call whose name and arguments are between tags."""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .argument_text import is_text, json_of_text, property_schema
from .marker import num_begun

_NAME_CHARACTERS = string.ascii_letters + string.digits + "_-"
_MAX_NAME_CHARACTERS = 64


def is_of_name(char: str) -> bool:
    """Whether a function's name may have this character."""
    return char in _NAME_CHARACTERS


@dataclass(frozen=True, slots=True)
class Tags:
    """`name_open NAME name_close (ARGUMENT)* call_close`, each argument `key_open KEY key_close
    value_open VALUE value_close`, with blanks between tags. A line break after `value_open` and one
    before `value_close` are no part of the value."""

    name_open: str
    name_close: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    call_close: str


class _Place(Enum):
    NAME_OPEN = auto()
    NAME = auto()
    NAME_CLOSE = auto()
    BETWEEN = auto()
    """Before an argument or the end of the call."""
    KEY = auto()
    VALUE_OPEN = auto()
    VALUE = auto()
    STRING = auto()
    """Within a value of which a part was given."""


class TaggedCallScanner:
    """Gives the arguments as a JSON object. Strings are given as they arrive, other values when
    they are complete. Once the function is known, text that is no argument ends the call."""

    id: str | None = None

    def __init__(
        self, tags: Tags, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self.unread = ""
        self._tags = tags
        self._names = names
        self._schemas = schemas
        self._place = _Place.NAME_OPEN
        self._text = ""
        """What was read and is not used yet."""
        self._candidate = ""
        self._num_arguments = 0
        self._schema: object = None
        """That of the current argument."""

    def push(self, char: str) -> str:
        """Consume a character; returns the arguments that are now certain."""
        self._text += char
        given = ""
        while not (self.is_done or self.is_broken):
            before = (self._place, len(self._text))
            given += self._step()
            if before == (self._place, len(self._text)):
                break
        return given

    def _step(self) -> str:
        match self._place:
            case _Place.NAME_OPEN:
                self._pass_tag(self._tags.name_open, _Place.NAME)
            case _Place.NAME:
                self._read_name()
            case _Place.NAME_CLOSE:
                if self._pass_tag(self._tags.name_close, _Place.BETWEEN):
                    self.name = self._candidate
                    return "{"
            case _Place.BETWEEN:
                return self._read_between()
            case _Place.KEY:
                return self._read_key()
            case _Place.VALUE_OPEN:
                self._read_value_open()
            case _Place.VALUE:
                return self._read_value()
            case _Place.STRING:
                return self._read_string()
        return ""

    def _pass_tag(self, tag: str, then: _Place) -> bool:
        """Whether the tag is complete; anything else is no call."""
        if self._text.startswith(tag):
            self._enter(then, self._text[len(tag) :])
            return True
        self.is_broken = not tag.startswith(self._text)
        return False

    def _enter(self, place: _Place, rest: str) -> None:
        self._place, self._text = place, rest

    def _read_name(self) -> None:
        rest = self._text.lstrip(_NAME_CHARACTERS)
        self._candidate = self._text[: len(self._text) - len(rest)]
        if rest:
            self.is_broken = self._candidate not in self._names
            self._enter(_Place.NAME_CLOSE, rest)
        else:
            self.is_broken = len(self._candidate) > _MAX_NAME_CHARACTERS

    def _read_between(self) -> str:
        self._text = self._text.lstrip()
        key_open, call_close = self._tags.key_open, self._tags.call_close
        if self._text.startswith(key_open):
            self._enter(_Place.KEY, self._text[len(key_open) :])
            return ""
        if self._text == call_close:
            self.is_done = True
        elif not any(tag.startswith(self._text) for tag in (key_open, call_close)):
            self.is_done, self.unread = True, self._text
        return "}" if self.is_done else ""

    def _read_key(self) -> str:
        key, close, rest = self._text.partition(self._tags.key_close)
        if not close:
            return ""
        self._enter(_Place.VALUE_OPEN, rest)
        self._schema = property_schema(self._schemas.get(self._candidate), key.strip())
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        return f"{comma}{json.dumps(key.strip(), ensure_ascii=False)}: "

    def _read_value_open(self) -> None:
        tag = self._tags.value_open
        begun = self._text.lstrip() if tag else self._text
        if begun.startswith(tag):
            self._enter(_Place.VALUE, begun[len(tag) :])
        elif not tag.startswith(begun):
            self._enter(_Place.VALUE, self._text)

    def _read_value(self) -> str:
        if is_text(self._schema):
            if not self._text:
                return ""
            self._enter(_Place.STRING, self._text.removeprefix("\n"))
            return '"'
        value, close, rest = self._text.partition(self._tags.value_close)
        if not close:
            return ""
        self._enter(_Place.BETWEEN, rest)
        return json_of_text(value.removeprefix("\n").removesuffix("\n"), self._schema)

    def _read_string(self) -> str:
        value, close, rest = self._text.partition(self._tags.value_close)
        if close:
            self._enter(_Place.BETWEEN, rest)
            return _within_string(value.removesuffix("\n")) + '"'
        num_held = num_begun(self._text, self._tags.value_close)
        certain = self._text[: len(self._text) - num_held].removesuffix("\n")
        self._text = self._text[len(certain) :]
        return _within_string(certain)


def _within_string(text: str) -> str:
    """A text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
