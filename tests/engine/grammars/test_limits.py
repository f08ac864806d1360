from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.engine.errors import InvalidGrammar
from loraplex.engine.grammars.limits import (
    MAX_CHOICES,
    MAX_MULTIPLES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_PROPERTIES,
    check_grammar,
)
from loraplex.engine.grammars.spec import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec


def schema_of(value: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def nested(depth: int) -> dict[str, Any]:
    """So many containers within one another."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


def with_properties(count: int) -> dict[str, Any]:
    half: dict[str, Any] = {f"p{number}": {} for number in range(count // 2)}
    rest: dict[str, Any] = {f"q{number}": {} for number in range(count - count // 2 - 1)}
    return {"properties": {**half, "inner": {"properties": rest}}}


def choices(count: int) -> GrammarSpec:
    return GrammarSpec(GrammarKind.CHOICE, json.dumps([str(number) for number in range(count)]))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(GrammarKind.REGEX, "a" * MAX_GRAMMAR_BYTES),
        schema_of(nested(MAX_SCHEMA_DEPTH)),
        schema_of(with_properties(MAX_SCHEMA_PROPERTIES)),
        schema_of({"multipleOf": MAX_MULTIPLES}),
        schema_of({"multipleOf": 1e-9}),
        schema_of({"multipleOf": True}),
        schema_of({"properties": {"multipleOf": {"type": "string"}}}),
        choices(MAX_CHOICES),
        GrammarSpec(GrammarKind.JSON_OBJECT),
    ],
    ids=lambda spec: spec.text[:40],
)
def test_what_is_within_the_limits_is_taken(spec: GrammarSpec) -> None:
    check_grammar(spec)


@pytest.mark.parametrize(
    "spec",
    [
        schema_of(nested(MAX_SCHEMA_DEPTH + 1)),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"a":' * 10_000),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"a":' * 9_000 + "1" + "}" * 9_000),
        schema_of(with_properties(MAX_SCHEMA_PROPERTIES + 1)),
        schema_of({"multipleOf": MAX_MULTIPLES + 1}),
        schema_of({"multipleOf": 1.23456}),
        schema_of({"multipleOf": 1e30}),
        schema_of({"items": [{"multipleOf": MAX_MULTIPLES}, {"multipleOf": 7}]}),
        schema_of([]),
        GrammarSpec(GrammarKind.JSON_SCHEMA, ""),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"a": 1, "a": 2}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"maximum": NaN}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"title": "\ud800"}'),
        choices(0),
        choices(MAX_CHOICES + 1),
        GrammarSpec(GrammarKind.CHOICE, '["a", ""]'),
        GrammarSpec(GrammarKind.CHOICE, '["a", 1]'),
        GrammarSpec(GrammarKind.CHOICE, '"a"'),
        GrammarSpec(GrammarKind.CHOICE, "[" * 60_000),
        GrammarSpec(GrammarKind.JSON_OBJECT, "{}"),
        GrammarSpec(GrammarKind.REGEX, ""),
        GrammarSpec(GrammarKind.LARK, ""),
    ],
    ids=lambda spec: spec.text[:40].encode(errors="backslashreplace").decode(),
)
def test_what_is_beyond_the_limits_is_refused(spec: GrammarSpec) -> None:
    with pytest.raises(InvalidGrammar):
        check_grammar(spec)


def test_a_grammar_of_too_many_bytes_cannot_be_written_down() -> None:
    with pytest.raises(InvalidGrammar):
        GrammarSpec(GrammarKind.REGEX, "ü" * (MAX_GRAMMAR_BYTES // 2) + "a")
