"""Gets the answers of models to a golden set, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from .golden_set import GoldenCase, GoldenSet, Scorer
from .judge import TIE_SCORE, Comparison, compare, score_of_first
from .report import Models
from .requests import Line, answer_lines, embedding_lines, text_of, vector_of
from .scorers import cosine, equal_json, exact, rouge_l

Ask = Callable[[str, Sequence[Line]], Sequence[Mapping[str, Any]]]
"""Sends lines under a name that is unique within the evaluation; returns the bodies of the answers
in the order of the lines."""
Answers = Mapping[str, Sequence[str]]
"""By model, then by case."""
Scores = dict[tuple[str, int], float]
"""By model and index of the case."""


def get_answers(golden_set: GoldenSet, models: Models, ask: Ask) -> dict[str, list[str]]:
    """The answers of each model, by case."""
    names = models.names
    texts = list(map(text_of, ask("answers", answer_lines(golden_set, names))))
    return {model: texts[number :: len(names)] for number, model in enumerate(names)}


def get_scores(
    golden_set: GoldenSet, models: Models, answers: Answers, ask: Ask, *, judge: str | None
) -> dict[str, list[float]]:
    """The scores of each model, by case. `judge` is a model; cases with that scorer need it."""
    scores = _computed(golden_set, answers)
    scores |= _similarities(golden_set, models, answers, ask)
    if judge is not None:
        scores |= _judged(golden_set, models, answers, ask, judge)
    cases = range(len(golden_set.cases))
    return {model: [scores[model, at] for at in cases] for model in models.names}


def _computed(golden_set: GoldenSet, answers: Answers) -> Scores:
    """By the scorers that need no model."""
    scores: Scores = {}
    for at, case in enumerate(golden_set.cases):
        if score := _function(case):
            scores |= {(model, at): score(texts[at]) for model, texts in answers.items()}
    return scores


def _function(case: GoldenCase) -> Callable[[str], float] | None:
    """The score of an answer to this case, if it needs no model."""
    if follows := case.constraint():
        return lambda answer: float(follows(answer))
    functions = {Scorer.EXACT: exact, Scorer.JSON: equal_json, Scorer.ROUGE_L: rouge_l}
    if compare := functions.get(case.scored_by):
        return lambda answer: compare(answer, case.expected)
    return None


def _similarities(golden_set: GoldenSet, models: Models, answers: Answers, ask: Ask) -> Scores:
    """By embeddings. Each different text is embedded once. An empty answer scores 0."""
    pairs = {
        (model, at): (answers[model][at], case.expected)
        for at, case in enumerate(golden_set.cases)
        for model in models.names
        if case.scored_by is Scorer.EMBEDDING
    }
    texts = list(dict.fromkeys(text for pair in pairs.values() for text in pair if text.strip()))
    if not texts:
        return {}
    bodies = ask("embeddings", embedding_lines(texts, models.base))
    vectors = dict(zip(texts, map(vector_of, bodies), strict=True))
    return {
        key: cosine(vectors[answer], vectors[expected]) if answer in vectors else 0.0
        for key, (answer, expected) in pairs.items()
    }


def _judged(
    golden_set: GoldenSet, models: Models, answers: Answers, ask: Ask, judge: str
) -> Scores:
    """By a judge, against the answer of `models.against`, which has the score of a tie. Equal
    answers are a tie too."""
    scores: Scores = {}
    comparisons: dict[tuple[str, int], Comparison] = {}
    for at, case in enumerate(golden_set.cases):
        if case.scored_by is not Scorer.JUDGE:
            continue
        for model in models.names:
            answer, other = answers[model][at], answers[models.against][at]
            scores[model, at] = TIE_SCORE
            if answer != other:
                comparisons[model, at] = compare(case, answer, other)
    if comparisons:
        scores |= _compare(comparisons, ask, judge)
    return scores


def _compare(comparisons: Mapping[tuple[str, int], Comparison], ask: Ask, judge: str) -> Scores:
    """The mean score of the first answer, over both orders."""
    lines = [
        each.line(f"{number}-{order}", judge)
        for number, comparison in enumerate(comparisons.values())
        for order, each in enumerate((comparison, comparison.swapped))
    ]
    verdicts = [score_of_first(text_of(body)) for body in ask("judge", lines)]
    pairs = zip(verdicts[::2], verdicts[1::2], strict=True)
    return {
        key: fmean((first, 1 - second))
        for key, (first, second) in zip(comparisons, pairs, strict=True)
    }
