"""How a call is written: as a JSON object, a name before one, a Python expression, or tags."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .call_scanner import (
    CallScanner,
    NamedCallScanner,
    NumberedCallScanner,
    ObjectCallScanner,
)
from .pythonic_scanner import PythonicCallScanner
from .tagged_scanner import TaggedCallScanner, Tags, is_of_name

Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments, by function."""


class CallSpelling(Protocol):
    """Writes calls as models do, and makes the scanners that read them."""

    def head(self, name: str, number: str) -> str:
        """The text before a call's arguments. `number` counts the calls of an answer; most
        spellings do not write it."""

    def arguments(self, arguments: Mapping[str, Any]) -> str: ...

    @property
    def tail(self) -> str:
        """The text after the arguments."""

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        """The scanner for a call that begins with this character; None if there is none."""


class _JsonArguments:
    def arguments(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ObjectSpelling(_JsonArguments):
    """`{"name": "f", "arguments": {...}}`"""

    key: str = "arguments"

    def head(self, name: str, number: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        return "}"

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        return ObjectCallScanner(names) if first == "{" else None


@dataclass(frozen=True, slots=True)
class NamedSpelling(_JsonArguments):
    """The name between two texts, and then the arguments as an object."""

    before: str
    after: str
    name_end: str
    """The name ends where this begins; anything may be between it and the object."""
    tail: str = ""

    def head(self, name: str, number: str) -> str:
        return f"{self.before}{name}{self.after}"

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        if not is_of_name(first):
            return None
        return NamedCallScanner(names, before=self.before, name_end=self.name_end)


@dataclass(frozen=True, slots=True)
class NumberedSpelling(_JsonArguments):
    """The name and the call's number, and then the arguments as an object: `functions.f:0`. Name
    and number are the call's id, which the model sees again in the next prompt."""

    before: str
    """Models may omit it."""
    number_start: str
    after: str
    tail: str = ""

    def id(self, name: str, number: int | str) -> str:
        """The id of a call."""
        return f"{self.before}{name}{self.number_start}{number}"

    def head(self, name: str, number: str) -> str:
        return self.id(name, number) + self.after

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        if not is_of_name(first):
            return None
        return NumberedCallScanner(
            names, before=self.before, number_start=self.number_start, after=self.after
        )


@dataclass(frozen=True, slots=True)
class PythonicSpelling:
    """`f(city="Oslo", days=3)`: named arguments, each a Python literal."""

    tail = ")"

    def head(self, name: str, number: str) -> str:
        return f"{name}("

    def arguments(self, arguments: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={_as_python(value)}" for key, value in arguments.items())

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        return PythonicCallScanner(names) if is_of_name(first) else None


@dataclass(frozen=True, slots=True)
class EitherSpelling:
    """Written as the first; the other is read too, as models of a family differ."""

    written: CallSpelling
    other: CallSpelling

    def head(self, name: str, number: str) -> str:
        return self.written.head(name, number)

    def arguments(self, arguments: Mapping[str, Any]) -> str:
        return self.written.arguments(arguments)

    @property
    def tail(self) -> str:
        return self.written.tail

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        scanner = self.written.scanner(first, names, schemas)
        return scanner or self.other.scanner(first, names, schemas)


@dataclass(frozen=True, slots=True)
class TaggedSpelling:
    """The name and each argument between tags. Strings are written as they are."""

    tags: Tags
    value_break: str = ""
    """A line break between the tags and the value, where models write one."""
    call_break: str = ""
    """The same after the call."""

    def head(self, name: str, number: str) -> str:
        return f"{self.tags.name_open}{name}{self.tags.name_close}\n"

    def arguments(self, arguments: Mapping[str, Any]) -> str:
        return "".join(
            f"{self.argument_head(key)}{_as_text(value)}{self.argument_tail}"
            for key, value in arguments.items()
        )

    def argument_head(self, key: str) -> str:
        tags = self.tags
        return f"{tags.key_open}{key}{tags.key_close}{tags.value_open}{self.value_break}"

    @property
    def argument_tail(self) -> str:
        return f"{self.value_break}{self.tags.value_close}\n"

    @property
    def tail(self) -> str:
        return self.tags.call_close + self.call_break

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        opening = self.tags.name_open
        if first != opening[:1] if opening else not is_of_name(first):
            return None
        return TaggedCallScanner(self.tags, names, schemas)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_python(value: object) -> str:
    """A JSON value as a Python literal. Strings are the same in both."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_as_python, value))}]"
        case dict():
            items = (f"{_as_python(key)}: {_as_python(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case _:
            return repr(value)
