"""Scores by verdicts of a judge and by embeddings, with scripted models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from loraplex.api.evaluation.golden_set import GoldenCase, GoldenSet, Scorer
from loraplex.api.evaluation.report import Models
from loraplex.api.evaluation.requests import Line
from loraplex.api.evaluation.scoring import get_answers, get_scores

MODELS = Models("bot@2", "bot@1", "base")


class Scripted:
    """Answers lines by a table, and keeps them."""

    def __init__(self, **tables: Mapping[str, Any]) -> None:
        self._tables = tables
        self.asked: dict[str, list[Line]] = {}

    def __call__(self, name: str, lines: Sequence[Line]) -> list[dict[str, Any]]:
        self.asked[name] = list(lines)
        return [self._body(line) for line in lines]

    def _body(self, line: Line) -> dict[str, Any]:
        if line.url == "/v1/embeddings":
            return {"data": [{"embedding": self._tables["vectors"][line.body["input"]]}]}
        if line.url == "/v1/completions":
            return {"choices": [{"text": self._tables["texts"][line.body["model"]]}]}
        question = line.body["messages"][0]["content"]
        verdict = next(said for part, said in self._tables["verdicts"].items() if part in question)
        return {"choices": [{"message": {"content": verdict}}]}


def scores(ask: Scripted, **case: Any) -> dict[str, float]:
    """Of one case, by model."""
    golden_set = GoldenSet([GoldenCase("a", prompt="p", **case)])
    answers = get_answers(golden_set, MODELS, ask)
    found = get_scores(golden_set, MODELS, answers, ask, judge="judge")
    return {model: score for model, (score,) in found.items()}


TEXTS = {"bot@2": "new", "bot@1": "old", "base": "plain"}


@pytest.mark.parametrize(
    ("new_first", "new_second", "score"),
    [("A", "B", 1.0), ("B", "A", 0.0), ("A", "A", 0.5), ("tie", "tie", 0.5), ("A", "tie", 0.75)],
)
def test_the_verdicts_of_both_orders_count_half_each(
    new_first: str, new_second: str, score: float
) -> None:
    verdicts = {"Answer A:\nnew": new_first, "Answer B:\nnew": new_second, "plain": "tie"}
    ask = Scripted(texts=TEXTS, verdicts=verdicts)
    found = scores(ask, scorer=Scorer.JUDGE)
    assert found == {"bot@2": score, "bot@1": 0.5, "base": 0.5}
    assert len(ask.asked["judge"]) == 4


def test_equal_answers_are_a_tie_without_a_judge() -> None:
    ask = Scripted(texts=dict.fromkeys(TEXTS, "same"), verdicts={})
    assert set(scores(ask, scorer=Scorer.JUDGE).values()) == {0.5}
    assert "judge" not in ask.asked


def test_each_different_text_is_embedded_once_and_an_empty_answer_scores_0() -> None:
    texts = {"bot@2": "new", "bot@1": "new", "base": " "}
    ask = Scripted(texts=texts, vectors={"new": [3, 4], "expected": [4, 3]})
    found = scores(ask, scorer=Scorer.EMBEDDING, expected="expected")
    assert found == {"bot@2": pytest.approx(24 / 25), "bot@1": pytest.approx(24 / 25), "base": 0.0}
    assert [line.body["input"] for line in ask.asked["embeddings"]] == ["new", "expected"]
    assert {line.body["model"] for line in ask.asked["embeddings"]} == {"base"}


def test_answers_of_models_alternate_in_one_batch() -> None:
    ask = Scripted(texts=TEXTS)
    golden_set = GoldenSet([GoldenCase(name, prompt=name, expected="old") for name in "ab"])
    answers = get_answers(golden_set, MODELS, ask)
    assert answers == {model: [text] * 2 for model, text in TEXTS.items()}
    assert [line.body["model"] for line in ask.asked["answers"]] == list(TEXTS) * 2
    assert get_scores(golden_set, MODELS, answers, ask, judge=None)["bot@1"] == [1.0, 1.0]
