"""The report of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from .golden_set import GoldenSet, Scorer
from .intervals import Interval, bootstrap, interval

ROUNDING = 1e-9
"""What sums of scores may be off: no regression."""


class Models(msgspec.Struct, frozen=True):
    """What was evaluated. A field of the API's requests names each."""

    candidate: str
    against: str
    """What the candidate is compared with."""
    base: str

    @property
    def names(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys((self.candidate, self.against, self.base)))


class SliceReport(msgspec.Struct, frozen=True):
    """The scores of the cases of a slice."""

    slice: str
    num_cases: int
    candidate: Interval
    against: Interval
    base: Interval
    difference: Interval
    """Of the candidate's score and the other's, paired by case."""
    is_regression: bool
    """The mean difference is below the negative tolerance."""


class CaseReport(msgspec.Struct, frozen=True):
    """A case: the answer and the score of each model."""

    id: str
    scorer: Scorer
    slices: list[str]
    answers: dict[str, str]
    scores: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """The result of an evaluation."""

    golden_set_sha256: str
    models: Models
    tolerance: float
    is_regression: bool
    slices: list[SliceReport]
    cases: list[CaseReport]

    @classmethod
    def of(
        cls,
        golden_set: GoldenSet,
        models: Models,
        answers: Mapping[str, Sequence[str]],
        scores: Mapping[str, Sequence[float]],
        *,
        tolerance: float,
        sha256: str,
    ) -> Self:
        """The report of these answers and scores, by model and case."""
        slices = [
            _slice(name, cases, models, scores, tolerance)
            for name, cases in golden_set.slices.items()
        ]
        cases = [
            CaseReport(
                case.id,
                case.scored_by,
                case.slices,
                {model: answers[model][at] for model in models.names},
                {model: scores[model][at] for model in models.names},
            )
            for at, case in enumerate(golden_set.cases)
        ]
        is_regression = any(each.is_regression for each in slices)
        return cls(sha256, models, tolerance, is_regression, slices, cases)

    @property
    def worse_cases(self) -> list[CaseReport]:
        """Those in which the candidate scores below the other, the largest difference first."""
        return sorted(
            (each for each in self.cases if self._difference(each) < -ROUNDING),
            key=self._difference,
        )

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def _difference(self, case: CaseReport) -> float:
        return case.scores[self.models.candidate] - case.scores[self.models.against]


def _slice(
    name: str,
    cases: Sequence[int],
    models: Models,
    scores: Mapping[str, Sequence[float]],
    tolerance: float,
) -> SliceReport:
    candidate, against, base = (
        [scores[model][at] for at in cases]
        for model in (models.candidate, models.against, models.base)
    )
    difference = bootstrap([one - other for one, other in zip(candidate, against, strict=True)])
    return SliceReport(
        name,
        len(cases),
        interval(candidate),
        interval(against),
        interval(base),
        difference,
        difference.mean < -tolerance - ROUNDING,
    )
