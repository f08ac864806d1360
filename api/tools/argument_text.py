"""Arguments that models write as plain text, converted to JSON by their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

_MAX_REFERENCES = 8
_TYPE_NAMES: Mapping[type, str] = {str: "string", bool: "boolean", type(None): "null"}
_PYTHON_WORDS: Mapping[str, tuple[str, str]] = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}
"""Some templates show models booleans and nulls as Python writes them."""


def is_text(schema: object) -> bool:
    """Whether the schema allows strings only."""
    return argument_types(schema) == {"string"}


def json_of_text(text: str, schema: object) -> str:
    """JSON for an argument's text: a value of the schema's types if the text is one, otherwise a
    string. Without types, any JSON is one."""
    types = argument_types(schema)
    kind, word = _PYTHON_WORDS.get(text.strip().lower(), ("", ""))
    if kind in types:
        return word
    if "string" not in types and is_json(text):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def argument_types(schema: object) -> frozenset[str]:
    """The names of the types that a schema allows; empty if it names none."""
    return frozenset(_types(schema))


def _types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    yield from (name for name in [declared, *as_list(declared)] if isinstance(name, str))
    values = as_list(schema.get("enum")) + ([schema["const"]] if "const" in schema else [])
    yield from (_TYPE_NAMES.get(type(value), "other") for value in values)
    for option in as_list(schema.get("anyOf")) + as_list(schema.get("oneOf")):
        yield from _types(option)


def as_list(value: object) -> list[Any]:
    """A keyword's list; empty if the schema has something else there."""
    return value if isinstance(value, list) else []


def is_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError:
        return False
    return True


def property_schema(schema: Mapping[str, Any] | None, key: str) -> object:
    """The schema of one argument, without references at its top; None if there is none."""
    found = _at(schema, ["properties", key])
    for _ in range(_MAX_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return found
        found = _at(schema, reference.removeprefix("#/").split("/"))
    return None


def _at(value: object, path: Sequence[str]) -> object:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
