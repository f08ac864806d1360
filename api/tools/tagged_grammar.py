"""Grammars of calls whose arguments are between tags, one rule per argument."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...engine.errors import InvalidGrammar
from .argument_text import argument_types, as_list, property_schema
from .call_spelling import TaggedSpelling

_ANY_KEY = '/[^<>"\\n]{1,64}/'
_UNENFORCED = ("pattern", "format", "minLength", "maxLength")
"""Keywords of strings: between tags a string ends where its tag does."""


class TaggedRules:
    """The rules for the arguments of one function.

    Arguments come in the order of the schema. A function whose schema names none may be called with
    any, unless it excludes them.
    """

    def __init__(
        self,
        spelling: TaggedSpelling,
        *,
        literal: Callable[[str], str],
        as_json: Callable[[Mapping[str, Any]], str],
        is_special: Callable[[str], bool],
    ) -> None:
        """`literal`: a text as Lark symbols. `is_special`: the text is a special token."""
        self._spelling = spelling
        self._literal = literal
        self._as_json = as_json
        self._is_special = is_special

    def of(self, name: str, schema: Mapping[str, Any], *, is_strict: bool) -> dict[str, str]:
        """The rule `name` and those that it uses. Raises InvalidGrammar for a strict schema that
        tags cannot enforce."""
        properties = schema.get("properties")
        if not properties or not isinstance(properties, Mapping):
            if schema.get("additionalProperties") is False:
                return {name: '""'}
            return {name: f"{name}_any*", **self._any_argument(f"{name}_any")}
        required = as_list(schema.get("required"))
        rules = {
            name: " ".join(
                f"{name}_{number}" + ("" if key in required else "?")
                for number, key in enumerate(properties)
            )
        }
        for number, key in enumerate(properties):
            rules |= self._argument(f"{name}_{number}", schema, key, is_strict=is_strict)
        return rules

    def _any_argument(self, rule: str) -> dict[str, str]:
        before, after = (
            self._literal(text) for text in self._spelling.argument_head("\0").split("\0")
        )
        return {rule: f"{before} {_ANY_KEY} {after} {rule}_text", **self._text(f"{rule}_text")}

    def _argument(
        self, rule: str, schema: Mapping[str, Any], key: str, *, is_strict: bool
    ) -> dict[str, str]:
        head = self._literal(self._spelling.argument_head(key))
        tail = self._literal(self._spelling.argument_tail)
        value = property_schema(schema, key)
        if not isinstance(value, Mapping):
            return {rule: f"{head} {rule}_text", **self._text(f"{rule}_text")}
        types = argument_types(value)
        choices = [value["const"]] if "const" in value else as_list(value.get("enum"))
        if types == {"string"} and choices:
            words = " | ".join(self._literal(choice) or '""' for choice in choices)
            return {rule: f"{head} ({words}) {tail}"}
        if "string" in types:
            _check_enforced(key, value, is_strict=is_strict)
            return {rule: f"{head} {rule}_text", **self._text(f"{rule}_text")}
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return {
            rule: f"{head} {rule}_json {tail}",
            f"{rule}_json": self._as_json({**value, **definitions}),
        }

    def _text(self, rule: str) -> dict[str, str]:
        """Free text up to the end of the argument."""
        close = self._spelling.tags.value_close
        if self._is_special(close):
            end = self._literal(close + "\n")
            return {rule: f"{rule.upper()} {end}", rule.upper(): "/(.|\\n)*/"}
        pattern = re.escape(close).replace("/", "\\/")
        return {
            rule: f"{rule}_closed {json.dumps(chr(10))}",
            f"{rule}_closed[lazy]": f"/(.|\\n)*{pattern}/",
        }


def _check_enforced(key: str, schema: Mapping[str, Any], *, is_strict: bool) -> None:
    found = [keyword for keyword in _UNENFORCED if keyword in schema]
    if is_strict and found:
        raise InvalidGrammar(
            f"`{found[0]}` of the argument {key!a} cannot be enforced in this base's call format"
        )
