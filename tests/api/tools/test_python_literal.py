"""Python literals as JSON, against Python's own parser."""

from __future__ import annotations

import ast
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.tools.python_literal import PythonLiteral

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


def converted(text: str) -> str | None:
    """The JSON of a literal, with one character after it; None if it is none."""
    literal = PythonLiteral()
    given = ""
    for number, char in enumerate(text + ")"):
        given += literal.push(char)
        if literal.is_broken:
            return None
        if literal.is_done:
            num_read = number + (not literal.is_behind)
            return given if num_read == len(text) else None
    return None


@settings(max_examples=80, deadline=None)
@given(value=VALUES)
def test_what_python_writes_is_the_same_value_in_json(value: object) -> None:
    written = converted(repr(value))
    assert written is not None
    assert json.loads(written) == value
    assert converted(ascii(value)) is not None
    assert json.loads(converted(ascii(value)) or "") == value


@settings(max_examples=80, deadline=None)
@given(value=VALUES)
def test_json_is_the_same_value(value: object) -> None:
    written = converted(json.dumps(value))
    assert written is not None
    assert json.loads(written) == value


PIECES = [
    *("'", '"', "\\", "[", "]", "{", "}", ",", ":", " ", "\n", "x", "u", "U", "n", "N", "0", "7"),
    *("True", "None", "null", "-", "+", "1", ".5", "e", "_", "(", ")", "f'", "b''", "é", "00e9"),
]


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=10))
def test_any_text_is_read_as_python_reads_it_or_refused(pieces: list[str]) -> None:
    text = "".join(pieces).strip()
    written = converted(text)
    if written is None or any(word in text for word in ("null", "\\/", "\n")):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        assert json.loads(written) == ast.literal_eval(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1_000", "1000"),
        ("0x1F", "31"),
        ("+2", "2"),
        (".5", "0.5"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("1e5", "1e5"),
        ("true", "true"),
        ("'\\x41\\101\\u00e9\\U0001F600\\q'", '"AA\\u00e9😀\\\\q"'),
        ('"\\ud83d\\ude00"', '"\\ud83d\\ude00"'),
        ("'a\\\nb'", '"ab"'),
        ("'a\nb'", '"a\\nb"'),
        ("'\\7x'", '"\\u0007x"'),
        ("[1, 2,]", "[1, 2]"),
        ("{'a': 1,}", '{"a": 1}'),
        ("[]", "[]"),
        ("{ }", "{}"),
    ],
)
def test_literals_are_read_as_python_does(text: str, expected: str) -> None:
    assert converted(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "f(1)", "1 + 2", "(1, 2)", "{1, 2}", "{1: 2}", "'a' 'b'", "f'{x}'", "[1 2]"),
        *("[,]", "{,}", "{'a'}", "{'a': }", "[1", "'a", "nan", "inf", "1e999", "007", "--1"),
        *("__import__('os')", "'\\xg0'", "'\\U00110000'", "[" * 65, "9" * 401),
    ],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    assert converted(text) is None
