"""Golden sets: cases of a prompt and what its answer has to be, one JSON object per line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from ..client.errors import InvalidArgument
from .constraints import Constraint, InvalidConstraint, matches_pattern, matches_schema

ALL = "all"
"""The slice of every case."""
FIXED_FIELDS = frozenset({"model", "messages", "prompt", "stream", "n"})
"""Fields of a request that `request` of a case cannot set."""


class Scorer(StrEnum):
    """How an answer gets its score, from 0 to 1."""

    EXACT = "exact"
    """1 if the answer is the expected text, without whitespace around either."""
    JSON = "json"
    """1 if the answer is JSON equal to the expected value."""
    ROUGE_L = "rouge_l"
    """ROUGE-L, F1."""
    SCHEMA = "schema"
    """1 if the answer is JSON that follows the schema."""
    PATTERN = "pattern"
    """1 if the pattern occurs in the answer."""
    EMBEDDING = "embedding"
    """Cosine of the base's embeddings of the answer and the expected text; 0 if negative."""
    JUDGE = "judge"
    """Share of comparisons with the answer of the model compared against that the answer wins."""


OF_TEXTS = frozenset({Scorer.EXACT, Scorer.ROUGE_L, Scorer.EMBEDDING})
"""Scorers that compare with an expected text."""


class GoldenCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a golden set."""

    id: str
    messages: list[dict[str, Any]] | None = None
    """The prompt of a chat completion. A case has either these or `prompt`."""
    prompt: str | None = None
    """The prompt of a completion."""
    expected: Any = None
    schema: dict[str, Any] | bool | None = None
    pattern: str | None = None
    scorer: Scorer | None = None
    """Without it, `schema` and `pattern` name theirs; other cases use `exact` for an expected text,
    and `json` for another value."""
    slices: list[str] = []
    request: dict[str, Any] = {}
    """More fields of the request, such as `max_tokens`."""

    @property
    def scored_by(self) -> Scorer:
        """The scorer of this case."""
        if self.scorer is not None:
            return self.scorer
        if self.schema is not None:
            return Scorer.SCHEMA
        if self.pattern is not None:
            return Scorer.PATTERN
        return Scorer.EXACT if isinstance(self.expected, str) else Scorer.JSON

    def constraint(self) -> Constraint | None:
        """What the answer has to follow, if the scorer is `schema` or `pattern`. Raises
        InvalidConstraint, and InvalidArgument if the extra `eval` is not installed."""
        if self.scored_by is Scorer.SCHEMA:
            return matches_schema(self.schema)
        if self.scored_by is Scorer.PATTERN:
            return matches_pattern(self.pattern or "")
        return None

    def problem(self) -> str | None:
        """Why this is not a valid case, or None."""
        if not self.id:
            return "id is empty"
        if (self.messages is None) == (self.prompt is None):
            return "a case has either messages or prompt"
        if unsettable := sorted(FIXED_FIELDS & self.request.keys()):
            return f"request cannot set {', '.join(unsettable)}"
        if ALL in self.slices or len(set(self.slices)) < len(self.slices):
            return f"slices have to differ from each other and from {ALL!r}"
        return self._problem_of_scorer()

    def _problem_of_scorer(self) -> str | None:
        scorer = self.scored_by
        if self.schema is not None and scorer is not Scorer.SCHEMA:
            return f"the scorer {scorer} takes no schema"
        if self.pattern is not None and scorer is not Scorer.PATTERN:
            return f"the scorer {scorer} takes no pattern"
        if scorer in OF_TEXTS and not isinstance(self.expected, str):
            return f"the scorer {scorer} needs an expected text"
        if scorer is Scorer.EMBEDDING and not self.expected.strip():
            return "the scorer embedding needs an expected text that is not empty"
        if scorer is Scorer.JSON and self.expected is None:
            return "a case needs expected, schema or pattern"
        if scorer is Scorer.JUDGE and not isinstance(self.expected, str | None):
            return "the expected answer for the scorer judge is a text"
        if scorer is Scorer.SCHEMA and self.schema is None:
            return "the scorer schema needs a schema"
        if scorer is Scorer.PATTERN and self.pattern is None:
            return "the scorer pattern needs a pattern"
        try:
            self.constraint()
        except InvalidConstraint as exc:
            return str(exc)
        return None


class GoldenSet:
    """The cases of a file, all with messages or all with prompts."""

    def __init__(self, cases: list[GoldenCase]) -> None:
        self.cases = cases

    @classmethod
    def read(cls, file: Path, *, shown_as: str | None = None) -> Self:
        """The golden set in this file, which messages name by its path or `shown_as`. Empty lines
        are skipped. Raises InvalidArgument with the number of the first line that is wrong."""
        name = shown_as or str(file)
        cases: list[GoldenCase] = []
        ids: set[str] = set()
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                case = msgspec.json.decode(line, type=GoldenCase)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
                raise _invalid(name, number, str(exc)) from exc
            if problem := case.problem():
                raise _invalid(name, number, problem)
            if case.id in ids:
                raise _invalid(name, number, f"the id {case.id!r} is not unique")
            if cases and (case.messages is None) != (cases[0].messages is None):
                raise _invalid(name, number, "the cases of a set all have messages, or all prompt")
            ids.add(case.id)
            cases.append(case)
        if not cases:
            raise InvalidArgument(f"{name} has no cases.")
        return cls(cases)

    @property
    def scorers(self) -> set[Scorer]:
        """Those of the cases."""
        return {case.scored_by for case in self.cases}

    @property
    def slices(self) -> dict[str, list[int]]:
        """The indices of the cases of each slice: first of all, then by name."""
        names = sorted({name for case in self.cases for name in case.slices})
        return {ALL: list(range(len(self.cases)))} | {
            name: [at for at, case in enumerate(self.cases) if name in case.slices]
            for name in names
        }


def _invalid(name: str, number: int, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{name}, line {number}: {problem}")
