"""Refuses grammars that exceed size limits before they are compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal

from ...adapters.strict_json import MalformedJson, parse_json_object
from ..errors import InvalidGrammar
from .spec import GrammarKind, GrammarSpec

MAX_SCHEMA_DEPTH = 64
"""Containers of the schema's JSON within one another: an object within an object takes two."""
MAX_SCHEMA_PROPERTIES = 500
"""Over all of its objects."""
MAX_MULTIPLES = 20_000
"""The sum of the significant digits of a schema's `multipleOf` as numbers: the library creates a
state for each remainder (99991 took 0.6 s and 50 MB)."""
MAX_CHOICES = 1000


def check_grammar(spec: GrammarSpec) -> None:
    """Raises InvalidGrammar for violations that can be detected without the compiler."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            check_schema(read_schema(spec))
        case GrammarKind.CHOICE:
            read_choices(spec)
        case GrammarKind.JSON_OBJECT:
            if spec.text:
                raise InvalidGrammar("json_object takes no text")
        case GrammarKind.REGEX | GrammarKind.LARK:
            if not spec.text:
                raise InvalidGrammar(f"the {spec.kind.value} is empty")


def read_schema(spec: GrammarSpec) -> dict[str, object]:
    try:
        return parse_json_object(spec.text.encode())
    except (MalformedJson, UnicodeEncodeError) as exc:
        raise InvalidGrammar(f"the schema: {exc}") from exc


def read_choices(spec: GrammarSpec) -> list[str]:
    try:
        choices = json.loads(spec.text)
    except (ValueError, RecursionError) as exc:
        raise InvalidGrammar("the choices are no JSON array") from exc
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidGrammar("the choices are no array of strings")
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        raise InvalidGrammar(f"there are from 1 to {MAX_CHOICES} choices, and none is empty")
    return choices


def check_schema(schema: dict[str, object]) -> None:
    num_properties = num_multiples = 0
    for depth, container in _containers(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidGrammar(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
        if isinstance(container, dict):
            properties = container.get("properties")
            num_properties += len(properties) if isinstance(properties, dict) else 0
            num_multiples += _significant(container.get("multipleOf"))
        if num_properties > MAX_SCHEMA_PROPERTIES:
            raise InvalidGrammar(f"the schema has more than {MAX_SCHEMA_PROPERTIES} properties")
        if num_multiples > MAX_MULTIPLES:
            raise InvalidGrammar("the schema's multipleOf has too many significant digits")


def _significant(number: object) -> int:
    """12000 for 12000, 125 for 1.25; 0 for anything that is not a number."""
    if not isinstance(number, int | float) or isinstance(number, bool):
        return 0
    digits = int("".join(map(str, Decimal(str(number)).as_tuple().digits)))
    return max(digits, int(abs(number)))


def _containers(value: object) -> Iterator[tuple[int, dict[str, object] | list[object]]]:
    """Each with its depth, 1 for the outermost."""
    level: list[object] = [value]
    depth = 0
    while level:
        depth += 1
        inner: list[object] = []
        for entry in level:
            if isinstance(entry, dict | list):
                yield depth, entry
                inner += entry.values() if isinstance(entry, dict) else entry
        level = inner
