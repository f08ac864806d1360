"""The demo's task: its answers follow from the requests, and test requests are held out."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from loraplex.api.demo.corpus import base_examples, style_examples
from loraplex.api.demo.task import (
    ADAPTER_STYLES,
    NUM_HELD_OUT,
    Comparison,
    Query,
    Request,
    Style,
    held_out_requests,
    training_requests,
)

PLAIN = Request(
    "list",
    Query(("weight", "color"), "orders", "year", Comparison.EQUAL, 42, limit=None),
)
FULL = Request("show", Query(("name",), "ships", "age", Comparison.GREATER, 7, limit=12))


def test_words_the_request() -> None:
    assert PLAIN.prompt == "list the weight and color of orders with year equal to 42"
    assert FULL.prompt == "show the name of ships with age greater than 7, at most 12"


@pytest.mark.parametrize(
    ("request_", "style", "answer"),
    [
        (
            PLAIN,
            Style.ECHO,
            "You asked me to list the weight and color of orders with year equal to 42.",
        ),
        (PLAIN, Style.SQL, "SELECT weight, color FROM orders WHERE year = 42;"),
        (FULL, Style.SQL, "SELECT name FROM ships WHERE age > 7 LIMIT 12;"),
        (
            PLAIN,
            Style.PIRATE,
            "Arr, matey! Ye be wantin' th' weight an' color o' orders whose year be 42? "
            "Aye, by th' seven seas!",
        ),
    ],
)
def test_answers_in_each_style(request_: Request, style: Style, answer: str) -> None:
    assert request_.answer(style) == answer


def test_json_answer_is_the_query() -> None:
    assert json.loads(FULL.answer(Style.JSON)) == {
        "action": "select",
        "table": "ships",
        "fields": ["name"],
        "where": [["age", ">", 7]],
        "limit": 12,
    }


def test_held_out_requests_are_always_the_same_and_distinct() -> None:
    requests = held_out_requests()
    assert requests[:50] == held_out_requests(50)
    assert len({request.query for request in requests}) == NUM_HELD_OUT


def test_no_more_requests_than_are_held_out() -> None:
    with pytest.raises(ValueError, match="201 held-out requests"):
        held_out_requests(NUM_HELD_OUT + 1)


def test_training_skips_a_query_that_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 11
    skipped = next(training_requests(seed))
    monkeypatch.setattr("loraplex.api.demo.task.held_out_requests", lambda: [skipped])
    assert skipped.query not in {r.query for r in islice(training_requests(seed), 500)}


def test_no_held_out_query_occurs_in_what_the_models_learn() -> None:
    held_out = {request.prompt for request in held_out_requests()}
    learned = islice(base_examples(seed=1), 2_000)
    assert held_out.isdisjoint(example.prompt for example in learned)
    for style in ADAPTER_STYLES:
        learned = islice(style_examples(style, seed=1), 2_000)
        assert held_out.isdisjoint(example.prompt for example in learned)


def test_the_base_learns_no_style_as_an_answer() -> None:
    answers = {e.answer for e in islice(base_examples(seed=1), 2_000) if e.prompt is not None}
    assert not any(answer.startswith(("SELECT", "{", "Arr")) for answer in answers)
