"""Schemas of golden sets and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ..contract.answer_model import Absent, AnswerModel
from ..contract.request_model import RequestModel
from .aliases import VersionNumber
from .batches import FileId

Model = Annotated[str, StringConstraints(min_length=1, max_length=256)]
SetName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Tolerance = Annotated[float, Field(ge=0, le=1)]


class GoldenSetBody(RequestModel):
    """The complete new state of a golden set."""

    file: FileId
    """A file of the purpose `evals`, with a case per line. It is kept as long as the set has it."""
    tolerance: Tolerance = 0.0
    """The loss of mean score that is no regression."""
    judge: Model | None = None
    """The model that judges cases with the scorer `judge`."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"file": "file-0123456789abcdef0123456789abcdef", "tolerance": 0.02},
    )


class EvaluationBody(RequestModel):
    """An evaluation to start."""

    version: VersionNumber
    """The candidate."""
    golden_set: SetName
    against: VersionNumber | Literal["base"] | None = None
    """The version to compare with, or the base. By default the version that requests for the
    adapter get, or the base if that is the candidate."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"version": 4, "golden_set": "refunds"},
        {"version": 4, "golden_set": "refunds", "against": 3},
    )


class GateBody(RequestModel):
    """The complete new state of a gate."""

    golden_set: SetName
    tolerance: Tolerance | None = None
    """The loss of mean score that is allowed in a slice; by default that of the golden set."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"golden_set": "refunds"},)


@dataclass(frozen=True, slots=True)
class GateView(AnswerModel):
    adapter: str
    alias: str
    golden_set: str
    tolerance: float | None
    """Null: that of the golden set."""
    created_by: str
    updated_at: datetime
    object: Literal["adapter.alias.gate"] = "adapter.alias.gate"


@dataclass(frozen=True, slots=True)
class GoldenSetView(AnswerModel):
    adapter: str
    name: str
    file: str
    sha256: str
    """Of the file."""
    num_cases: int
    tolerance: float
    judge: str | None
    created_by: str
    """The actor who set its present form, as in the history of aliases."""
    updated_at: datetime
    object: Literal["adapter.golden_set"] = "adapter.golden_set"


@dataclass(frozen=True, slots=True)
class IntervalView(AnswerModel):
    """A mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SliceView(AnswerModel):
    """The scores of the cases of a slice."""

    slice: str
    num_cases: int
    candidate: IntervalView
    against: IntervalView
    base: IntervalView
    difference: IntervalView
    """Of the candidate's score and the other's, paired by case."""
    is_regression: bool
    """The mean difference is below the negative tolerance."""


@dataclass(frozen=True, slots=True)
class ModelAnswerView(AnswerModel):
    answer: str
    score: float


@dataclass(frozen=True, slots=True)
class CaseView(AnswerModel):
    """A case with the answers to it; texts are cut after 2,000 characters."""

    id: str
    scorer: str
    slices: Sequence[str]
    prompt: str
    expected: str | None
    candidate: ModelAnswerView
    against: ModelAnswerView
    base: ModelAnswerView


@dataclass(frozen=True, slots=True)
class EvaluationErrorView(AnswerModel):
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class EvaluationView(AnswerModel):
    id: str
    adapter: str
    golden_set: str
    sha256: str
    """Of the file of the set when the evaluation was started, like the tolerance and the judge."""
    num_cases: int
    tolerance: float
    judge: str | None
    version: int
    """The candidate."""
    against: int | None
    """The version that it is compared with; null: the base."""
    base: str
    status: str
    """`queued`, `running`, `succeeded`, `failed` or `cancelled`."""
    is_regression: bool | None
    """Whether a slice has a regression; null until there is a report."""
    slices: Sequence[SliceView] | None
    """The first is of all cases."""
    batches: Mapping[str, str]
    """The ids of its batches, by what they ask for."""
    error: EvaluationErrorView | None
    created_by: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    cases: Sequence[CaseView] | Absent | None
    """At most 100 cases, the largest losses first, then the largest gains; absent in lists."""
    object: Literal["adapter.evaluation"] = "adapter.evaluation"
