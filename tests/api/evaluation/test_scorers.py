"""Scorers, against plain references."""

from __future__ import annotations

import math
import random
import re
from functools import cache
from typing import Any

import pytest

from loraplex.api.evaluation.scorers import cosine, equal_json, exact, rouge_l


def plain_rouge_l(answer: str, expected: str) -> float:
    """F1 of recall and precision, as Lin defines them, by the recursive definition."""
    one, other = re.findall(r"\w+", answer.lower()), re.findall(r"\w+", expected.lower())

    @cache
    def common(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return 0
        if one[i] == other[j]:
            return 1 + common(i + 1, j + 1)
        return max(common(i + 1, j), common(i, j + 1))

    length = common(0, 0)
    if not length:
        return 0.0
    recall, precision = length / len(other), length / len(one)
    return 2 * recall * precision / (recall + precision)


def test_rouge_l_is_the_recursive_definition_on_random_texts() -> None:
    draw = random.Random(0)
    for _ in range(300):
        one, other = (" ".join(draw.choices("abcde", k=draw.randint(1, 30))) for _ in range(2))
        assert rouge_l(one, other) == pytest.approx(plain_rouge_l(one, other))


def test_rouge_l_gives_the_scores_of_lins_paper() -> None:
    reference = "police killed the gunman"  # section 3.1: recall and precision are 3/4 and 2/4
    assert rouge_l("police kill the gunman", reference) == pytest.approx(3 / 4)
    assert rouge_l("the gunman kill police", reference) == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [("", "", 1.0), ("", "word", 0.0), ("...", "!", 1.0), ("Straße, ja!", "STRASSE JA", 1.0),
     ("東京 です", "東京 です", 1.0)],
)  # fmt: skip
def test_rouge_l_of_edge_cases(answer: str, expected: str, score: float) -> None:
    assert rouge_l(answer, expected) == score


def test_rouge_l_of_long_texts_takes_no_quadratic_table() -> None:
    words = [str(number) for number in range(20_000)]
    assert rouge_l(" ".join(words), " ".join(words[::2])) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("yes", 1.0), (" yes\n", 1.0), ("Yes", 0.0), ("yes.", 0.0), ("", 0.0)],
)
def test_exact_ignores_whitespace_around_alone(answer: str, score: float) -> None:
    assert exact(answer, "yes") == score


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ('{"b": [1, null], "a": "x"}', {"a": "x", "b": [1, None]}, 1.0),
        ("1.0", 1, 1.0),
        ("1", True, 0.0),
        ("[0]", [False], 0.0),
        ("true", True, 1.0),
        ('{"a": 1}', {"a": 1, "b": None}, 0.0),
        ("[1, 2]", [2, 1], 0.0),
        ("[1]", [1, 1], 0.0),
        ("no JSON", "no JSON", 0.0),
        ("\ud800", "x", 0.0),
        ("", {}, 0.0),
    ],
)
def test_json_is_equal_by_value(answer: str, expected: Any, score: float) -> None:
    assert equal_json(answer, expected) == score


def test_the_cosine_is_that_of_the_angle() -> None:
    for degrees in (0, 30, 60, 90):
        turned = [2 * math.cos(math.radians(degrees)), 2 * math.sin(math.radians(degrees))]
        assert cosine([3.0, 0.0], turned) == pytest.approx(math.cos(math.radians(degrees)))
    assert cosine([1.0, 0.0], [-1.0, 0.0]) == 0.0
    assert cosine([1.0, 0.0], [0.0, 0.0]) == 0.0
