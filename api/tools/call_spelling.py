"""How a call is written: a JSON object, a name before a JSON object, or tags."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .call_scanner import CallScanner, NamedCallScanner, ObjectCallScanner
from .tagged_scanner import TaggedCallScanner, Tags, is_of_name

Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments, by function."""


class CallSpelling(Protocol):
    """Writes calls as models do, and makes the scanners that read them."""

    def head(self, name: str) -> str:
        """The text before a call's arguments."""

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

    def head(self, name: str) -> str:
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

    def head(self, name: str) -> str:
        return f"{self.before}{name}{self.after}"

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        if not is_of_name(first):
            return None
        return NamedCallScanner(names, before=self.before, name_end=self.name_end)


@dataclass(frozen=True, slots=True)
class EitherSpelling:
    """Written as the first; the other is read too, as models of a family differ."""

    written: CallSpelling
    other: CallSpelling

    def head(self, name: str) -> str:
        return self.written.head(name)

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

    def head(self, name: str) -> str:
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
