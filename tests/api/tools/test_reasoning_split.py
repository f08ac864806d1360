"""Separating reasoning from the answer, however the output is split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.tools.answer_part import CallOpened, ReasoningText, Text
from loraplex.api.tools.answer_reader import AnswerReader
from loraplex.api.tools.readers import ReasoningReader, TextReader, read_after_reasoning
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import (
    COHERE_THINK,
    GEMMA4_THINK,
    GRANITE_THINK,
    IMPLIED_THINK,
    KEPT_THINK,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    Beginning,
    ReasoningFormat,
)
from loraplex.api.tools.reasoning_split import ReasoningSplit
from loraplex.api.tools.tool_format import HERMES, MISTRAL_ARGS

FORMATS = (THINK, MISTRAL_THINK, GRANITE_THINK, SEED_THINK, COHERE_THINK, GEMMA4_THINK)


def split(written: ReasoningFormat, beginning: Beginning, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplit(written, beginning)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


TRANSCRIPTS = [
    # DeepSeek R1, Qwen 3 2507 and MiniMax M2: the prompt opens the reasoning.
    (
        THINK,
        Beginning.REASONING,
        "Is 9.11 > 9.8?\n\nNo.\n</think>\n\n9.8 is.\n",
        ("Is 9.11 > 9.8?\n\nNo.", "9.8 is.\n"),
    ),
    (THINK, Beginning.REASONING, "Hm, cut o", ("Hm, cut o", "")),
    (THINK, Beginning.REASONING, "Cut </thi", ("Cut </thi", "")),
    (THINK, Beginning.REASONING, "</think>4", ("", "4")),
    (THINK, Beginning.REASONING, " \n</think>\n ", ("", "")),
    # The model opens it again.
    (THINK, Beginning.REASONING, "\n<think>\nHm.</think>4", ("Hm.", "4")),
    # Qwen 3 and GLM 4.5: the model opens the reasoning.
    (THINK, Beginning.EITHER, "<think>\nHm.\n</think>\n\nYes", ("Hm.", "Yes")),
    (THINK, Beginning.EITHER, "\n<think></think>Yes", ("", "Yes")),
    (THINK, Beginning.EITHER, "<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
    (THINK, Beginning.EITHER, " No reasoning.\n", ("", " No reasoning.\n")),
    (THINK, Beginning.EITHER, "a <think>b</think> c", ("", "a <think>b</think> c")),
    (THINK, Beginning.EITHER, "<thin", ("", "<thin")),
    (THINK, Beginning.EITHER, "", ("", "")),
    # The prompt closed it, as with `enable_thinking: false`.
    (THINK, Beginning.ANSWER, "\n<think>a</think>", ("", "\n<think>a</think>")),
    (IMPLIED_THINK, Beginning.REASONING, "a </ </think >\n</think>b", ("a </ </think >", "b")),
    (MISTRAL_THINK, Beginning.EITHER, "[THINK]Hm [1].[/THINK]Four", ("Hm [1].", "Four")),
    (
        GRANITE_THINK,
        Beginning.EITHER,
        "Here is my thought process:\n\nHere is a sum.\n\nHere is my response:\n\n4",
        ("Here is a sum.", "4"),
    ),
    (GRANITE_THINK, Beginning.EITHER, "Here is my answer: 4", ("", "Here is my answer: 4")),
    (SEED_THINK, Beginning.EITHER, "<seed:think>Hm.</seed:think>4", ("Hm.", "4")),
    (
        COHERE_THINK,
        Beginning.EITHER,
        "<|START_THINKING|>Hm.<|END_THINKING|>4",
        ("Hm.", "4"),
    ),
    (GEMMA4_THINK, Beginning.EITHER, "<|channel>thought\nHm.\n<channel|>4", ("Hm.", "4")),
    (GEMMA4_THINK, Beginning.EITHER, "<|channel>thought\n\n Hm.<channel|>4", ("Hm.", "4")),
    (GEMMA4_THINK, Beginning.EITHER, "<|channel>thoughts?<channel|>4", ("thoughts?", "4")),
    (GEMMA4_THINK, Beginning.EITHER, "<|channel>thought\n<channel|>4", ("", "4")),
    (GEMMA4_THINK, Beginning.EITHER, "<|channel>tho", ("tho", "")),
    (GEMMA4_THINK, Beginning.ANSWER, "A thought\n4", ("", "A thought\n4")),
]  # fmt: skip


@pytest.mark.parametrize(("written", "beginning", "output", "expected"), TRANSCRIPTS)
def test_published_formats_are_read_wherever_the_output_is_split(
    written: ReasoningFormat, beginning: Beginning, output: str, expected: tuple[str, str]
) -> None:
    assert split(written, beginning, [output]) == expected
    assert split(written, beginning, list(output)) == expected
    for first in range(len(output)):
        for second in range(first, len(output), 3):
            pieces = [output[:first], output[first:second], output[second:]]
            assert split(written, beginning, pieces) == expected


def reference(written: ReasoningFormat, beginning: Beginning, output: str) -> tuple[str, str]:
    """The same from the whole output at once."""
    begun = output.lstrip()
    is_opened = begun.startswith(written.opening)
    if beginning is Beginning.ANSWER or (beginning is Beginning.EITHER and not is_opened):
        return "", output
    reasoning, closing, answer = begun.removeprefix(written.opening).partition(written.closing)
    reasoning = reasoning.lstrip().removeprefix(written.label)
    return reasoning.strip(), answer.lstrip() if closing else ""


@settings(max_examples=200, deadline=None)
@given(
    written=st.sampled_from(FORMATS),
    beginning=st.sampled_from(Beginning),
    data=st.data(),
)
def test_the_pieces_never_matter(
    written: ReasoningFormat, beginning: Beginning, data: st.DataObject
) -> None:
    texts = [*written.markers, written.opening[:3], written.closing[:4], " ", "\n", "x", "é"]
    texts += [written.label, written.label[:4]]
    pieces = data.draw(st.lists(st.sampled_from(texts), max_size=10))
    output = "".join(pieces)
    expected = reference(written, beginning, output)
    assert split(written, beginning, pieces) == expected
    assert split(written, beginning, list(output)) == expected


def test_nothing_certain_is_held_back() -> None:
    splitter = ReasoningSplit(THINK, Beginning.EITHER)
    assert [splitter.push(text) for text in ("<think>", "a", "b <", "c", "</think>", "d", " ")] == [
        ("", ""), ("a", ""), ("b", ""), (" <c", ""), ("", ""), ("", "d"), ("", " "),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "prompt_end", "continued", "beginning"),
    [
        (THINK, "<|im_start|>assistant\n<think>\n", "", Beginning.REASONING),
        (THINK, "<|im_start|>assistant\n", "", Beginning.EITHER),
        (THINK, "assistant\n<think>\n\n</think>\n\n", "", Beginning.ANSWER),
        (THINK, "I said <think><|im_end|>\n<|im_start|>assistant\n", "", Beginning.EITHER),
        (IMPLIED_THINK, "<|Assistant|>", "", Beginning.REASONING),
        (IMPLIED_THINK, "<|Assistant|></think>", "", Beginning.ANSWER),
        (THINK, "<think>\nHm, so", "<think>\nHm, so", Beginning.REASONING),
        (THINK, "<think>a</think>The", "<think>a</think>The", Beginning.ANSWER),
        (IMPLIED_THINK, "The", "The", Beginning.ANSWER),
        (GEMMA4_THINK, "<|turn>model\n<|channel>thought\n<channel|>", "", Beginning.ANSWER),
        (GEMMA4_THINK, "<|turn>model\n", "", Beginning.EITHER),
    ],
)
def test_the_end_of_the_prompt_shows_what_follows(
    written: ReasoningFormat, prompt_end: str, continued: str, beginning: Beginning
) -> None:
    assert written.beginning_after(prompt_end, continued=continued) is beginning


def test_calls_follow_the_reasoning_and_are_text_within_it() -> None:
    call = HERMES.write([("f", {"a": 1})])
    reader = ReasoningReader(Reasoning(THINK, Beginning.REASONING), AnswerReader(HERMES, {"f"}))
    parts = [*reader.push(f"Try {call}\n</think>\n\n{call}"), *reader.finish()]
    assert parts[0] == ReasoningText(f"Try {call}")
    assert isinstance(parts[1], CallOpened)
    assert reader.num_calls == 1
    mixed = "[THINK]Hm.[/THINK]Sure[TOOL_CALLS]f[ARGS]{}"
    reader = ReasoningReader(
        Reasoning(MISTRAL_THINK, Beginning.EITHER), AnswerReader(MISTRAL_ARGS, {"f"})
    )
    kinds = [type(part) for char in mixed for part in reader.push(char)]
    assert kinds.index(CallOpened) > kinds.index(Text) > kinds.index(ReasoningText)


def test_reasoning_that_is_not_returned_is_separated_all_the_same() -> None:
    reasoning = Reasoning(THINK, Beginning.REASONING, is_returned=False)
    reader = ReasoningReader(reasoning, TextReader())
    assert not reader.is_plain
    assert reader.push("Hm.</think>") == []
    assert reader.push("\n4") == [Text("4")]
    assert reader.is_plain
    assert reader.finish() == []


CALL = HERMES.write([("f", {"a": 1})])


@pytest.mark.parametrize(
    ("beginning", "output", "text", "num_calls"),
    [
        (Beginning.REASONING, "Hm.\n</think>\n\n4", "<think>Hm.\n</think>\n\n4", 0),
        (Beginning.REASONING, f"I {CALL}?</think>{CALL}", f"<think>I {CALL}?</think>", 1),
        (Beginning.REASONING, "cut </thi", "<think>cut </thi", 0),
        (Beginning.REASONING, "", "<think>", 0),
        (Beginning.EITHER, "<think>Hm.</think>4", "<think>Hm.</think>4", 0),
        (Beginning.EITHER, "\n<think>Hm.", "\n<think>Hm.", 0),
        (Beginning.EITHER, " 4 </think>", " 4 </think>", 0),
        (Beginning.EITHER, CALL, "", 1),
        (Beginning.EITHER, "<thi", "<thi", 0),
        (Beginning.ANSWER, "4 <think>", "4 <think>", 0),
    ],
)
def test_reasoning_that_is_kept_is_text_with_its_markers(
    beginning: Beginning, output: str, text: str, num_calls: int
) -> None:
    """vLLM's `minimax_m2_append_think`."""

    def read(pieces: list[str]) -> tuple[str, int]:
        reasoning = Reasoning(KEPT_THINK, beginning)
        reader = read_after_reasoning(reasoning, AnswerReader(HERMES, {"f"}))
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert not any(isinstance(part, ReasoningText) for part in parts)
        said = "".join(part.text for part in parts if isinstance(part, Text))
        return said, reader.num_calls

    assert read([output]) == (text, num_calls)
    assert read(list(output)) == (text, num_calls)
    for cut in range(len(output)):
        assert read([output[:cut], output[cut:]]) == (text, num_calls)


def test_reasoning_that_is_kept_is_left_out_if_it_is_not_asked_for() -> None:
    reasoning = Reasoning(KEPT_THINK, Beginning.REASONING, is_returned=False)
    reader = read_after_reasoning(reasoning, TextReader())
    assert reader.push("Hm.</think>4") == [Text("4")]
