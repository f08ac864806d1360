from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.strict_json import (
    SHOWN_CHARACTERS,
    DuplicateKey,
    MalformedJson,
    parse_json_object,
    shown,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES))
def test_reads_every_strict_object(value: dict[str, object]) -> None:
    assert parse_json_object(json.dumps(value, allow_nan=False).encode()) == value


@given(st.binary(max_size=40))
def test_any_other_bytes_are_one_kind_of_error(data: bytes) -> None:
    try:
        assert isinstance(parse_json_object(data), dict)
    except MalformedJson:
        return


def test_the_repeated_key_is_named() -> None:
    with pytest.raises(DuplicateKey) as caught:
        parse_json_object(b'{"a": {"b": 1, "c": 2, "b": 3}}')
    assert caught.value.key == "b"


@given(st.text(max_size=300))
def test_shown_text_is_printable_ascii_of_bounded_length(text: str) -> None:
    result = shown(text)
    assert result.isascii()
    assert result.isprintable()
    assert len(result) <= SHOWN_CHARACTERS + 2
