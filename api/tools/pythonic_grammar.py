"""Grammars of calls that are written as Python does, one rule per argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .argument_text import argument_types, as_list, property_schema

_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_STRING = r"/\"([^\"\\\n]|\\.)*\"/ | /'([^'\\\n]|\\.)*'/"
_NUMBER = r"/-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?/"


def pythonic_rules(
    name: str, schema: Mapping[str, Any], *, as_json: Callable[[Mapping[str, Any]], str]
) -> dict[str, str]:
    """The rule `name` for the arguments of one function, and those that it uses.

    Arguments come in the order of the schema. A function whose schema names none may be called with
    any, unless it excludes them. Values are JSON that follows the schema: but for booleans and
    null, which are written as Python does, this is Python too.
    """
    properties = schema.get("properties")
    if not properties or not isinstance(properties, Mapping):
        if schema.get("additionalProperties") is False:
            return {name: '""'}
        argument = f'{_ANY_KEY} "=" {name}_any'
        return {name: f'({argument} (", " {argument})*)?', **_any_value(f"{name}_any")}
    keys = list(properties)
    rules = _sequence(name, keys, as_list(schema.get("required")))
    for number, key in enumerate(keys):
        rules |= _argument(f"{name}_{number}", schema, key, as_json)
    return rules


def _sequence(name: str, keys: Sequence[str], required: Sequence[Any]) -> dict[str, str]:
    """The arguments with commas between them. `first` rules have none before them."""
    rules = {f"{name}_first_{len(keys)}": '""', f"{name}_more_{len(keys)}": '""'}
    for number, key in reversed(list(enumerate(keys))):
        first, more = (f"{name}_{place}_{number + 1}" for place in ("first", "more"))
        argument = f"{name}_{number} {more}"
        skips = key not in required
        rules[f"{name}_first_{number}"] = argument + (f" | {first}" if skips else "")
        rules[f"{name}_more_{number}"] = f'", " {argument}' + (f" | {more}" if skips else "")
    return {name: f"{name}_first_0", **rules}


def _argument(
    rule: str,
    schema: Mapping[str, Any],
    key: str,
    as_json: Callable[[Mapping[str, Any]], str],
) -> dict[str, str]:
    value = property_schema(schema, key)
    head = json.dumps(f"{key}=")
    if not isinstance(value, Mapping):
        return {rule: f"{head} {rule}_any", **_any_value(f"{rule}_any")}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    words = "".join(f' | "{word}"' for word in _words(value))
    return {
        rule: f"{head} ({rule}_json{words})",
        f"{rule}_json": as_json({**value, **definitions}),
    }


def _words(schema: Mapping[str, Any]) -> list[str]:
    """Python's words for those values of the schema that JSON writes otherwise."""
    declared = schema.get("type")
    allowed: list[object] = [None] if "null" in argument_types(schema) else []
    if declared == "boolean" or "boolean" in as_list(declared):
        allowed += [True, False]
    if "const" in schema or "enum" in schema:
        choices = [schema["const"]] if "const" in schema else as_list(schema["enum"])
        allowed = [value for value in allowed if any(value is choice for choice in choices)]
    return [repr(value) for value in allowed]


def _any_value(rule: str) -> dict[str, str]:
    """Any literal."""
    return {
        rule: f'"True" | "False" | "None" | {rule}_string | {_NUMBER} | {rule}_list | {rule}_dict',
        f"{rule}_string": _STRING,
        f"{rule}_list": f'"[" ({rule} (", " {rule})*)? "]"',
        f"{rule}_dict": f'"{{" ({rule}_item (", " {rule}_item)*)? "}}"',
        f"{rule}_item": f'{rule}_string ": " {rule}',
    }
