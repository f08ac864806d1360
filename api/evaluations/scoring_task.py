"""What the scoring process is given, and what it answers."""

from __future__ import annotations

import msgspec

from ..evaluation.golden_set import Scorer
from ..evaluation.report import Models, SliceReport


class ScoringTask(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an evaluation. All paths are absolute."""

    golden_set: str
    """Path of the cases."""
    file_id: str
    """The name of that file in messages."""
    models: Models | None = None
    """None: the golden set is only checked."""
    judge: str | None = None
    tolerance: float = 0.0
    sha256: str = ""
    """Of the golden set."""
    answers: dict[str, str] = {}
    """Paths of the answers so far, by what they were asked for."""
    lines: str = ""
    """Path to which the next requests are written."""
    cpu_seconds: int = 30
    """Processor time that it may take."""


class Invalid(msgspec.Struct, frozen=True, tag=True):
    """The file is no golden set."""

    problem: str


class Valid(msgspec.Struct, frozen=True, tag=True):
    """The golden set was checked."""

    num_cases: int
    has_judge: bool
    """It has cases that need a judge."""


class Asks(msgspec.Struct, frozen=True, tag=True):
    """Requests have to be answered first; they are at `lines`."""

    name: str
    endpoint: str


class ModelAnswer(msgspec.Struct, frozen=True):
    """The answer of a model to a case, cut, and its score."""

    answer: str
    score: float


class ComparedCase(msgspec.Struct, frozen=True):
    """A case with the answers to it; long texts are cut."""

    id: str
    scorer: Scorer
    slices: list[str]
    prompt: str
    expected: str | None
    candidate: ModelAnswer
    against: ModelAnswer
    base: ModelAnswer


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The report."""

    is_regression: bool
    slices: list[SliceReport]
    cases: list[ComparedCase]
    """Those in which the candidate is worse come first, then those in which it is better."""


Outcome = Invalid | Valid | Asks | Scored
