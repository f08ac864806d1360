"""Which answers are refusals."""

from __future__ import annotations

import pytest

from loraplex.api.inference.answer_opening import MAX_CHARACTERS, PHRASES, AnswerOpening


def is_refusal(*pieces: str, finish_reason: str = "stop") -> bool:
    opening = AnswerOpening()
    for piece in pieces:
        opening.add(piece)
    return opening.is_refusal(finish_reason)


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't help with that.",
        "I\N{RIGHT SINGLE QUOTATION MARK}m  sorry,\nbut I cannot do it.",
        "Unfortunately, I am unable to answer.",
        "AS AN AI, I have no opinion.",
    ],
)
def test_a_phrase_of_refusals_is_one_however_it_is_spelled(answer: str) -> None:
    assert is_refusal(*answer)


@pytest.mark.parametrize("answer", ["Paris.", '{"city": "Paris"}', "I can help with that."])
def test_other_answers_are_none(answer: str) -> None:
    assert not is_refusal(*answer)


def test_an_answer_that_ends_without_text_is_a_refusal() -> None:
    assert is_refusal("", " \n")
    assert not is_refusal(" ", finish_reason="length"), "it was cut"


def test_a_phrase_deep_in_the_answer_is_no_refusal() -> None:
    assert not is_refusal("x" * MAX_CHARACTERS, "I'm sorry, but I can't help with that.")


def test_the_phrases_are_spelled_as_they_are_looked_for() -> None:
    for phrase in PHRASES:
        assert is_refusal(phrase), phrase
