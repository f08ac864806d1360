"""Parsing calls from an answer: calls and text, however the answer is split."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.tools.answer_part import ArgumentsText, CallOpened, Text
from loraplex.api.tools.answer_reader import AnswerReader
from loraplex.api.tools.tool_format import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    TOOL_FORMATS,
    ToolFormat,
)

NAMES = {"f", "get-weather_2"}
Read = tuple[str, list[tuple[str, str]]]
"""The text of an answer, and its calls: names and arguments as written."""


def read(written: ToolFormat, pieces: list[str]) -> Read:
    reader = AnswerReader(written, NAMES)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Text(piece):
                text += piece
            case CallOpened(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsText(index, piece):
                assert index == len(calls) - 1, "calls come one after another"
                calls[index] = (calls[index][0], calls[index][1] + piece)
    assert reader.num_calls == len(calls)
    return text, calls


def test_hermes_calls_are_told_from_text() -> None:
    answer = (
        "Let me see.\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>{\\""}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"x":[1,{}]},"name":"get-weather_2"}</tool_call>\n'
    )
    calls = [("f", '{"a": "}</tool_call>{\\""}'), ("get-weather_2", '{"x":[1,{}]}')]
    assert read(HERMES, [answer]) == ("Let me see.", calls)


def test_llama_calls_begin_the_answer_or_follow_the_python_tag() -> None:
    two = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}'
    assert read(LLAMA, [two]) == ("", [("f", '{"a": 1}'), ("f", "{}")])
    assert read(LLAMA, ["<|python_tag|>" + two]) == read(LLAMA, [two])
    assert read(LLAMA, ['It is {"name": "f"}']) == ('It is {"name": "f"}', [])


def test_mistral_calls_come_as_a_list_or_one_by_one() -> None:
    calls = [("f", '{"a": 1}'), ("f", '{"b": [2]}')]
    listed = '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"b": [2]}}]'
    assert read(MISTRAL, ["[TOOL_CALLS] " + listed]) == ("", calls)
    single = 'Sure[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"b": [2]}'
    assert read(MISTRAL_ARGS, [single]) == ("Sure", calls)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": 7, "type": null, "name": "f", "arguments": {"a": 1}, "z": 1.5}', '{"a": 1}'),
        ('{"parameters": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{ "name" :\n"f" ,\t"arguments" : {"a": 1} }', '{"a": 1}'),
        ('{"name": "\\u0066", "arguments": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_calls_are_read_however_the_model_spells_them(call: str, arguments: str) -> None:
    assert read(HERMES, [f"<tool_call>{call}</tool_call>"]) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " \n ",
        "<tool_call",
        "a < b <tool_cal>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call> is no function',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "<tool_call>get_weather(1)</tool_call>",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>\n  {"name": ["f"]}',
        '<tool_call>{"name": "f" "arguments": {}}',
    ],
)
def test_what_is_no_call_is_text_as_it_was_written(answer: str) -> None:
    assert read(HERMES, [answer]) == (answer, [])


def test_a_call_that_is_cut_off_keeps_the_arguments_so_far() -> None:
    cut = '<tool_call>\n{"name": "f", "arguments": {"city": "Par'
    assert read(HERMES, [cut]) == ("", [("f", '{"city": "Par')])


def test_text_behind_a_call_is_text_again() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.\n'
    assert read(HERMES, [answer]) == ("Done.", [("f", "{}")])


JSON_OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(
    written=st.sampled_from(list(TOOL_FORMATS.values())),
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), JSON_OBJECTS), min_size=1, max_size=3),
    data=st.data(),
)
def test_what_a_format_writes_is_read_whatever_the_pieces(
    written: ToolFormat, calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    answer = written.write(calls)
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=8).map(sorted))
    pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    text, made = read(written, pieces)
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in made] == calls


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]", "<|python_tag|>"),
    *('{"name": "f", ', '"arguments": ', "{}", "}", "{", '"', "[", "]", ",", ";"),
    *(" ", "\n", "<", "x"),
]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(
        st.sampled_from(PIECES),
        max_size=14,
    ),
    written=st.sampled_from(list(TOOL_FORMATS.values())),
)
def test_the_pieces_never_matter(tokens: list[str], written: ToolFormat) -> None:
    answer = "".join(tokens)
    whole = read(written, [answer])
    assert read(written, tokens) == whole
    assert read(written, list(answer)) == whole


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(["a", "b\n", " ", "é", "<", ">"]), max_size=12))
def test_text_without_calls_is_left_alone(words: list[str]) -> None:
    answer = "".join(words)
    assert not re.search("<tool_call>", answer)
    assert read(HERMES, [answer]) == (answer, [])
