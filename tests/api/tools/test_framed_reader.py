"""Answers between markers, however they are split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.tools.answer_part import CallOpened, ReasoningText, Text
from loraplex.api.tools.answer_reader import AnswerReader
from loraplex.api.tools.framed_reader import FramedReader
from loraplex.api.tools.readers import TextReader, read_after_reasoning
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import (
    ERNIE45_THINK,
    HUNYUAN_THINK,
    Beginning,
    Frame,
    ReasoningFormat,
)
from loraplex.api.tools.tool_format import HUNYUAN_A13B

FRAME = Frame("<answer>", "</answer>")
TRANSCRIPTS: list[tuple[ReasoningFormat, Beginning, str, tuple[str, str]]] = [
    (
        HUNYUAN_THINK,
        Beginning.EITHER,
        "<think>\nIs it?\n</think>\n<answer>\nIt is.\n</answer>",
        ("Is it?", "It is."),
    ),
    (
        HUNYUAN_THINK,
        Beginning.EITHER,
        "<think>\n\n</think>\n<answer>\nIt is.\n</answer>",
        ("", "It is."),
    ),
    (HUNYUAN_THINK, Beginning.ANSWER, "<answer>\nIt is.\n</answer>", ("", "It is.")),
    (HUNYUAN_THINK, Beginning.ANSWER, "It is <answer>.", ("", "It is <answer>.")),
    (HUNYUAN_THINK, Beginning.EITHER, "<answer>a</answer> b", ("", "a</answer> b")),
    (HUNYUAN_THINK, Beginning.EITHER, "<think>a</think><ans", ("a", "<ans")),
    (HUNYUAN_THINK, Beginning.EITHER, "<think>a</think><answer>b\n</ans", ("a", "b\n</ans")),
    (
        ERNIE45_THINK,
        Beginning.REASONING,
        "abc\n</think>\n\n<response>\ndef\n</response>\n",
        ("abc", "def"),
    ),
    (ERNIE45_THINK, Beginning.REASONING, "abc\n</think>\ndef", ("abc", "def")),
    (ERNIE45_THINK, Beginning.REASONING, "abc", ("abc", "")),
]


def read(written: ReasoningFormat, beginning: Beginning, pieces: list[str]) -> tuple[str, str]:
    reader = read_after_reasoning(Reasoning(written, beginning), TextReader())
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Text))


@pytest.mark.parametrize(("written", "beginning", "output", "expected"), TRANSCRIPTS)
def test_answers_between_markers_are_read_wherever_they_are_split(
    written: ReasoningFormat, beginning: Beginning, output: str, expected: tuple[str, str]
) -> None:
    assert read(written, beginning, [output]) == expected
    assert read(written, beginning, list(output)) == expected
    for cut in range(len(output)):
        assert read(written, beginning, [output[:cut], output[cut:]]) == expected


def reference(output: str) -> str:
    """The same from the whole output at once."""
    begun = output.strip()
    if not begun.startswith(FRAME.opening):
        return output
    inner = output.lstrip().removeprefix(FRAME.opening).lstrip()
    body = inner.rstrip()
    return body.removesuffix(FRAME.closing).rstrip() if body.endswith(FRAME.closing) else inner


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*FRAME, "<ans", "</a", "nswer>", " ", "\n", "x"]), max_size=9))
def test_the_pieces_never_matter(pieces: list[str]) -> None:
    output = "".join(pieces)
    for split in (pieces, list(output), [output]):
        reader = FramedReader(FRAME, TextReader())
        parts = [part for piece in split for part in reader.push(piece)] + reader.finish()
        assert "".join(part.text for part in parts if isinstance(part, Text)) == reference(output)


def test_what_is_certain_is_passed_on_at_once() -> None:
    reader = FramedReader(FRAME, TextReader())
    assert [reader.push(text) for text in ("<answer>", "\n", "a", " </ans", "x")] == [
        *([], [], [Text("a")], [], [Text(" </ansx")]),
    ]
    assert not reader.is_plain
    unframed = FramedReader(FRAME, TextReader())
    assert unframed.push("a") == [Text("a")]
    assert unframed.is_plain


def test_calls_between_markers_are_calls() -> None:
    call = HUNYUAN_A13B.write([("f", {"a": 1})])
    reader = read_after_reasoning(
        Reasoning(HUNYUAN_THINK, Beginning.EITHER), AnswerReader(HUNYUAN_A13B, {"f"})
    )
    output = f"<think>\nI call.\n</think>\n<answer>\n{call}\n</answer>"
    parts = [part for char in output for part in reader.push(char)] + reader.finish()
    assert [part.name for part in parts if isinstance(part, CallOpened)] == ["f"]
    assert not any(isinstance(part, Text) for part in parts)
