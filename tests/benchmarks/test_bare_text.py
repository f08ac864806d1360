"""What counts as text that repeats nothing."""

from __future__ import annotations

import pytest
from benchmarks.bare_text import openings, repeated_share
from benchmarks.speculation_work import BASE

from loraplex.api.demo.task import held_out_requests
from loraplex.engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("prompt", "answer", "share"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 0.0),
        ([1, 2, 3, 4], [1, 2, 3, 4], 2 / 4),  # it begins with two n-grams across the border
        ([9], [1, 2, 3, 1, 2, 3], 1 / 5),
        ([9], [7, 7, 7, 7, 7], 2 / 4),
        ([], [1, 2], 0.0),
    ],
)
def test_an_ngram_is_repeated_if_it_occurs_before(
    prompt: list[int], answer: list[int], share: float
) -> None:
    assert repeated_share(prompt, answer) == pytest.approx(share)


def test_openings_are_short_and_of_texts_that_answer_in_some_style() -> None:
    tokenizer = Tokenizer(BASE)
    requests = held_out_requests(20)
    found = list(openings(requests, tokenizer, seed=1))
    assert len(found) == len(requests)
    assert all(2 <= len(opening) <= 15 for opening in found)
    starts = ("SELECT", '{"action', "Arr")
    assert all(tokenizer.decode(opening).startswith(starts) for opening in found)
