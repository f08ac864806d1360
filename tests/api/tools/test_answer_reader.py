"""Parsing calls from an answer: calls and text, however the answer is split."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.tools.answer_part import ArgumentsText, CallOpened, Text
from loraplex.api.tools.answer_reader import AnswerReader
from loraplex.api.tools.call_spelling import PythonicSpelling, Schemas, TaggedSpelling
from loraplex.api.tools.tool_format import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    GRANITE,
    HERMES,
    HUNYUAN_A13B,
    INTERNLM,
    JAMBA,
    KIMI_K2,
    LFM2,
    LLAMA,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_ARGS,
    PHI4_MINI,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
    TOOL_FORMATS,
    XLAM,
    ToolFormat,
)

NAMES = {"f", "get-weather_2"}
Read = tuple[str, list[tuple[str, str]]]
"""The text of an answer, and its calls: names and arguments as written."""


def read(written: ToolFormat, pieces: list[str], schemas: Schemas | None = None) -> Read:
    reader = AnswerReader(written, NAMES, schemas)
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


WITH_JSON = [
    written
    for written in TOOL_FORMATS.values()
    if not isinstance(written.spelling, TaggedSpelling | PythonicSpelling)
]
"""Formats that can write any arguments."""


@settings(max_examples=150, deadline=None)
@given(
    written=st.sampled_from(WITH_JSON),
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


PYTHONIC_FORMATS = [PYTHONIC, LLAMA4_PYTHONIC, LFM2]


@settings(max_examples=60, deadline=None)
@given(
    written=st.sampled_from(PYTHONIC_FORMATS),
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(
                st.from_regex("[a-z_]{1,4}", fullmatch=True),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: (
                        st.lists(inner, max_size=3)
                        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
                    ),
                    max_leaves=6,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
def test_calls_in_python_are_read_whatever_the_pieces(
    written: ToolFormat, calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    answer = written.write(calls)
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=8).map(sorted))
    pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    text, made = read(written, pieces)
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in made] == calls


def test_a_string_in_python_arrives_as_it_is_written() -> None:
    reader = AnswerReader(PYTHONIC, NAMES)
    assert reader.push("[f(city") == []
    opened, *_ = reader.push("=")
    assert isinstance(opened, CallOpened)
    assert reader.push("'O") == [ArgumentsText(0, '"O')]
    assert reader.push("'") == [ArgumentsText(0, '"')]
    assert reader.push(")") == [ArgumentsText(0, "}")]


def test_a_call_that_the_model_numbers_has_the_models_id() -> None:
    reader = AnswerReader(KIMI_K2, NAMES)
    answer = KIMI_K2.write([("f", {}), ("f", {"a": 1})])
    opened = [part for part in reader.push(answer) if isinstance(part, CallOpened)]
    assert [part.id for part in opened] == ["functions.f:0", "functions.f:1"]
    other = AnswerReader(HERMES, NAMES)
    drawn = [part for part in other.push(HERMES.write([("f", {})])) if isinstance(part, CallOpened)]
    assert len(drawn[0].id) == 9


PIECES = [
    *("<function=f>", "<parameter=k>", "</parameter>", "</function>", "<arg_key>k</arg_key>"),
    *("<arg_value>", "</arg_value>", '<invoke name="f">', '<parameter name="k">', "</invoke>"),
    *("<minimax:tool_call>", "<tool_calls>", "functools", "<|tool_call|>", "f"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<｜tool▁call▁end｜>",
        "```json\n",
        "```",
        "<|action_start|>",
        "<|plugin|>",
        "<seed:tool_call>",
    ),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]", "<|python_tag|>"),
    *('{"name": "f", ', '"arguments": ', "{}", "}", "{", '"', "[", "]", ",", ";"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:1", "f:2", ":0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
    *('<steptml:invoke name="f">', '<steptml:parameter name="k">', "</steptml:parameter>"),
    *("</steptml:invoke>", "function", "<|python_start|>", "<|python_end|>", "</tool_calls>"),
    *("<|tool_call_start|>", "f(", "k=", ")", "'", "1", "True", "\\", ":", "```json"),
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


SCHEMAS: Schemas = {
    "f": {
        "type": "object",
        "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}},
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"$ref": "#/$defs/Unit"},
        },
    }
}
TRANSCRIPTS: list[tuple[ToolFormat, str, Read]] = [
    (
        QWEN3_CODER,
        "I look.\n\n<tool_call>\n<function=f>\n<parameter=city>\nSão \"Paulo\"\nBR\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["a", "</x>"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=get-weather_2>\n</function>\n</tool_call>\n",
        (
            "I look.",
            [
                (
                    "f",
                    '{"city": "São \\"Paulo\\"\\nBR", "days": 3, "exact": true, '
                    '"tags": ["a", "</x>"]}',
                ),
                ("get-weather_2", "{}"),
            ],
        ),
    ),
    (
        SEED_OSS,
        "<seed:tool_call>\n<function=f>\n<parameter=near>null</parameter>\n"
        "<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>Done.",
        ("Done.", [("f", '{"near": null, "unit": "C"}')]),
    ),
    (
        GLM45,
        "Sure.\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>1 < 2</arg_value>\n"
        "<arg_key>other</arg_key>\n<arg_value>[1, null]</arg_value>\n</tool_call>\n"
        "<tool_call>get-weather_2<arg_key>x</arg_key><arg_value>y</arg_value></tool_call>",
        (
            "Sure.",
            [("f", '{"city": "1 < 2", "other": [1, null]}'), ("get-weather_2", '{"x": "y"}')],
        ),
    ),
    (
        MINIMAX_M2,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">many</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n'
        "</minimax:tool_call>\nDone.",
        ("Done.", [("f", '{"city": "Oslo", "days": "many"}'), ("f", "{}")]),
    ),
    (
        DEEPSEEK_V3,
        "OK<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("OK", [("f", '{"city": "Oslo"}'), ("f", "{}")]),
    ),
    (
        DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get-weather_2<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", [("f", '{"a": 1}'), ("get-weather_2", "{}")]),
    ),
    (
        GRANITE,
        '<|tool_call|> [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        ("", [("f", '{"a": 1}'), ("f", "{}")]),
    ),
    (
        JAMBA,
        'Yes.<tool_calls>[\n    {"name": "f", "arguments": {"a": 1}},\n'
        '    {"name": "f", "arguments": {}}\n]</tool_calls>',
        ("Yes.", [("f", '{"a": 1}'), ("f", "{}")]),
    ),
    (
        INTERNLM,
        'Yes.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>\n',
        ("Yes.", [("f", '{"a": 1}')]),
    ),
    (PHI4_MINI, 'functools[{"name": "f", "arguments": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
    (
        HUNYUAN_A13B,
        'Sure. <tool_calls>[{"name": "f", "arguments": {"a": {"b": {"c": 1}}}}, '
        '{"name": "f", "arguments": {}}]</tool_calls>',
        ("Sure.", [("f", '{"a": {"b": {"c": 1}}}'), ("f", "{}")]),
    ),
    (
        XLAM,
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "get-weather_2", "arguments": {}}]',
        ("", [("f", '{"a": 1}'), ("get-weather_2", "{}")]),
    ),
    (
        XLAM,
        'I look.\n```json\n[{"name": "f", "arguments": {"a": 1}}]\n```\nDone.',
        ("I look.Done.", [("f", '{"a": 1}')]),
    ),
    (
        KIMI_K2,
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>'
        "get-weather_2:1 <|tool_call_argument_begin|> {}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ("Let me see.", [("f", '{"city": "Oslo"}'), ("get-weather_2", "{}")]),
    ),
    (
        PYTHONIC,
        "[f(city='São \"Paulo\"', days = 3, exact=True, near=None,\n  tags=[\"a\", 'it\\'s']), "
        "get-weather_2()]",
        (
            "",
            [
                (
                    "f",
                    '{"city": "São \\"Paulo\\"", "days": 3, "exact": true, "near": null, '
                    '"tags": ["a", "it\'s"]}',
                ),
                ("get-weather_2", "{}"),
            ],
        ),
    ),
    (
        PYTHONIC,
        'Sure.<|python_tag|>[f(a={"b": [-1.5, false,]},)]',
        ("Sure.", [("f", '{"a": {"b": [-1.5, false]}}')]),
    ),
    (
        LLAMA4_PYTHONIC,
        '<|python_start|>[f(city="Oslo"), f()]<|python_end|>',
        ("", [("f", '{"city": "Oslo"}'), ("f", "{}")]),
    ),
    (LLAMA4_PYTHONIC, '[f(city="Oslo")]', ("", [("f", '{"city": "Oslo"}')])),
    (
        LFM2,
        'I look.<|tool_call_start|>[f(city="Oslo")]<|tool_call_end|>Wait.',
        ("I look.Wait.", [("f", '{"city": "Oslo"}')]),
    ),
    (
        STEP3,
        "OK.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f">\n<steptml:parameter name="city">1 < 2</steptml:parameter>\n'
        '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke>'
        "<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get-weather_2">\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        ("OK.", [("f", '{"city": "1 < 2", "days": 3}'), ("get-weather_2", "{}")]),
    ),
    # Malformed
    (QWEN3_CODER, "<tool_call>\n<function=h>\n", ("<tool_call>\n<function=h>\n", [])),
    (QWEN3_CODER, "<tool_call>\n<funktion=f>", ("<tool_call>\n<funktion=f>", [])),
    (QWEN3_CODER, "<tool_call>\n<function=f", ("<tool_call>\n<function=f", [])),
    (QWEN3_CODER, "<tool_call><function=f>\n</tool_call>\nA", ("A", [("f", "{}")])),
    (GLM45, "<tool_call>hello</tool_call>", ("<tool_call>hello</tool_call>", [])),
    (GLM45, "<tool_call>f<arg_key>a</arg_key>1</arg_value></tool_call>", ("", [("f", '{"a": 1}')])),
    (MINIMAX_M2, "<minimax:tool_call>f()", ("<minimax:tool_call>f()", [])),
    (DEEPSEEK_V3, "<｜tool▁calls▁begin｜>f{}", ("<｜tool▁calls▁begin｜>f{}", [])),
    (DEEPSEEK_V31, "<｜tool▁calls▁begin｜>h{}", ("<｜tool▁calls▁begin｜>h{}", [])),
    (GRANITE, "<|tool_call|> nothing", ("<|tool_call|> nothing", [])),
    (INTERNLM, "<|action_start|><|interpreter|>", ("<|action_start|><|interpreter|>", [])),
    (PHI4_MINI, "functools is a module", ("functools is a module", [])),
    (XLAM, "[1, 2] is a list", ("[1, 2] is a list", [])),
    (XLAM, '[{"name": "h"}]', ('[{"name": "h"}]', [])),
    (XLAM, "```json\n{}\n```", ("```json\n{}\n```", [])),
    (KIMI_K2, "<|tool_calls_section_begin|>f{}", ("<|tool_calls_section_begin|>f{}", [])),
    (
        KIMI_K2,
        "<|tool_calls_section_begin|><|tool_call_begin|>f:x<|tool_call_argument_begin|>{}",
        ("<|tool_calls_section_begin|><|tool_call_begin|>f:x<|tool_call_argument_begin|>{}", []),
    ),
    (PYTHONIC, "[1] and [f] are notes", ("[1] and [f] are notes", [])),
    (PYTHONIC, "[f(x) for x in y]", ("[f(x) for x in y]", [])),
    (PYTHONIC, "[h(a=1)]", ("[h(a=1)]", [])),
    (PYTHONIC, "I call [f(a=1)]", ("I call [f(a=1)]", [])),
    (PYTHONIC, "[f(a=g(1))]", (")]", [("f", '{"a": ')])),
    (PYTHONIC, '["f(a=1)"]', ('["f(a=1)"]', [])),
    (STEP3, "<｜tool_calls_begin｜>f", ("<｜tool_calls_begin｜>f", [])),
    # Cut off
    (PYTHONIC, "[f(city='Os", ("", [("f", '{"city": "Os')])),
    (PYTHONIC, "[f(", ("[f(", [])),
    (QWEN3_CODER, "<tool_call><function=f><parameter=city>\nOs", ("", [("f", '{"city": "Os')])),
    (GLM45, "<tool_call>f\n<arg_key>days</arg_key><arg_value>1", ("", [("f", '{"days": ')])),
]  # fmt: skip


@pytest.mark.parametrize(("written", "answer", "expected"), TRANSCRIPTS)
def test_transcripts_are_read_wherever_they_are_split(
    written: ToolFormat, answer: str, expected: Read
) -> None:
    assert read(written, [answer], SCHEMAS) == expected
    assert read(written, list(answer), SCHEMAS) == expected
    for cut in range(len(answer)):
        assert read(written, [answer[:cut], answer[cut:]], SCHEMAS) == expected


@pytest.mark.parametrize("written", [QWEN3_CODER, SEED_OSS, MINIMAX_M2, GLM45, STEP3])
def test_a_string_between_tags_arrives_as_it_is_written(written: ToolFormat) -> None:
    assert isinstance(written.spelling, TaggedSpelling)
    reader = AnswerReader(written, NAMES, SCHEMAS)
    spelling = written.spelling
    reader.push(written.opening + written.before + spelling.head("f", "0"))
    reader.push(spelling.argument_head("city"))
    given = [part.text for part in reader.push('O"s') if isinstance(part, ArgumentsText)]
    assert "".join(given).lstrip('"') == 'O\\"s'
    (part,) = reader.push("lo <")
    assert part == ArgumentsText(0, "lo ")


@settings(max_examples=100, deadline=None)
@given(
    written=st.sampled_from([QWEN3_CODER, SEED_OSS, MINIMAX_M2, GLM45, STEP3]),
    city=st.text(max_size=8).filter(
        lambda text: not text.startswith("\n") and not text.endswith("\n")
    ),
    days=st.integers(),
    tags=st.lists(st.text(st.characters(exclude_characters="<"), max_size=3), max_size=3),
    data=st.data(),
)
def test_arguments_between_tags_keep_their_values_and_types(
    written: ToolFormat, city: str, days: int, tags: list[str], data: st.DataObject
) -> None:
    arguments = {"city": city, "days": days, "tags": tags, "near": None}
    answer = written.write([("f", arguments), ("get-weather_2", {})])
    cut = data.draw(st.integers(0, len(answer)))
    text, made = read(written, [answer[:cut], answer[cut:]], SCHEMAS)
    assert text == ""
    assert [(name, json.loads(written)) for name, written in made] == [
        ("f", arguments),
        ("get-weather_2", {}),
    ]
