"""Checks a golden set, or scores the answers to it, in a confined process that ends afterwards.

A tenant's schemas can take exponential time, and its texts much memory: the process has limits of
both, and reads only the files of its task. It reads the task from its standard input and writes the
outcome to its standard output. It is started by `scoring_process`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy.random  # noqa: F401  # before the process is confined, like the next

with suppress(ModuleNotFoundError):
    import jsonschema_rs  # noqa: F401

from ...adapters.confinement import ProcessLimits, confine
from ..client.errors import InvalidArgument
from ..evaluation.golden_set import GoldenCase, GoldenSet, Scorer
from ..evaluation.report import CaseReport, Models, Report
from ..evaluation.requests import Line, bodies_of, encoded
from ..evaluation.scoring import get_answers, get_scores
from .scoring_task import (
    Asks,
    ComparedCase,
    Invalid,
    ModelAnswer,
    Outcome,
    Scored,
    ScoringTask,
    Valid,
)

MAX_CASES = 1000
MAX_SLICES = 50
MAX_NAME_LENGTH = 200
"""Of a case's id and a slice's name."""
MAX_COMPARED = 100
"""Cases of a stored report."""
MAX_TEXT_LENGTH = 2000
"""Characters of a text in it."""
_MEMORY_BYTES = 1 << 30
_MEMORY_FACTOR = 8
"""A number of an embedding takes eight times the bytes of its text."""
_LINES_BYTES = 256 << 20


class _Asked(Exception):
    """The answers to these lines are missing."""

    def __init__(self, name: str, lines: Sequence[Line]) -> None:
        super().__init__(name)
        self.name = name
        self.lines = lines


def main() -> None:
    """Answer the task; an exit without an answer is a limit or an internal error."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=ScoringTask)
    read = [Path(task.golden_set), *map(Path, task.answers.values())]
    write = [Path(task.lines)] if task.lines else []
    for path in write:
        path.touch(0o600)
    confine(_limits(task, read), read=read, write=write)
    sys.stdout.buffer.write(msgspec.json.encode(outcome_of(task)))


def outcome_of(task: ScoringTask) -> Outcome:
    """The outcome, in this process."""
    try:
        golden_set = GoldenSet.read(Path(task.golden_set), shown_as=task.file_id)
        _check_size(golden_set, task.file_id)
    except InvalidArgument as exc:
        return Invalid(str(exc))
    if task.models is None:
        return Valid(len(golden_set.cases), Scorer.JUDGE in golden_set.scorers)
    try:
        return _score(golden_set, task, task.models)
    except _Asked as asked:
        Path(task.lines).write_bytes(encoded(asked.lines))
        return Asks(asked.name, asked.lines[0].url)


def _limits(task: ScoringTask, read: Sequence[Path]) -> ProcessLimits:
    size = sum(path.stat().st_size for path in read)
    return ProcessLimits(
        memory_bytes=_MEMORY_BYTES + _MEMORY_FACTOR * size,
        cpu_seconds=task.cpu_seconds,
        file_bytes=_LINES_BYTES,
    )


def _check_size(golden_set: GoldenSet, name: str) -> None:
    """Raises InvalidArgument if a report would not be bounded."""
    if len(golden_set.cases) > MAX_CASES:
        raise InvalidArgument(f"{name} has more than {MAX_CASES} cases.")
    slices = golden_set.slices
    if len(slices) > MAX_SLICES:
        raise InvalidArgument(f"{name} has more than {MAX_SLICES} slices.")
    names = [*slices, *(case.id for case in golden_set.cases)]
    if any(len(each) > MAX_NAME_LENGTH for each in names):
        raise InvalidArgument(f"{name} has a name of more than {MAX_NAME_LENGTH} characters.")


def _score(golden_set: GoldenSet, task: ScoringTask, models: Models) -> Scored:
    """The report. Raises _Asked if answers are missing."""

    def ask(name: str, lines: Sequence[Line]) -> list[dict[str, Any]]:
        if name not in task.answers:
            raise _Asked(name, lines)
        return bodies_of(Path(task.answers[name]), lines)

    answers = get_answers(golden_set, models, ask)
    scores = get_scores(golden_set, models, answers, ask, judge=task.judge)
    report = Report.of(
        golden_set, models, answers, scores, tolerance=task.tolerance, sha256=task.sha256
    )
    return Scored(report.is_regression, report.slices, _compared(golden_set, report))


def _compared(golden_set: GoldenSet, report: Report) -> list[ComparedCase]:
    """The cases that differ most: the losses, then the gains."""
    models = report.models
    pairs = list(zip(golden_set.cases, report.cases, strict=True))

    def order(pair: tuple[GoldenCase, CaseReport]) -> tuple[bool, float]:
        scores = pair[1].scores
        gain = scores[models.candidate] - scores[models.against]
        return gain >= 0, -abs(gain)

    return [_case(case, each, models) for case, each in sorted(pairs, key=order)[:MAX_COMPARED]]


def _case(case: GoldenCase, report: CaseReport, models: Models) -> ComparedCase:
    def answer(model: str) -> ModelAnswer:
        return ModelAnswer(_cut(report.answers[model]), report.scores[model])

    return ComparedCase(
        case.id,
        report.scorer,
        report.slices,
        _cut(_text(case.messages if case.prompt is None else case.prompt)),
        _expected(case),
        answer(models.candidate),
        answer(models.against),
        answer(models.base),
    )


def _expected(case: GoldenCase) -> str | None:
    """What the scorer looks for."""
    wanted: Mapping[Scorer, Any] = {Scorer.SCHEMA: case.schema, Scorer.PATTERN: case.pattern}
    expected = wanted.get(case.scored_by, case.expected)
    return None if expected is None else _cut(_text(expected))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]}…"


if __name__ == "__main__":
    main()
