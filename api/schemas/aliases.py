"""Schemas of an adapter's aliases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .generation import ModelName

VersionNumber = Annotated[int, Field(ge=1, le=999_999_999)]


Share = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(gt=1, le=100)]


class CanaryLimitsBody(RequestModel):
    """How much worse than the alias's own version a canary may be; null sets no limit."""

    error_rate: Share | None = 0.02
    """By how much the canary's share of failed requests may exceed the other version's."""
    refusals: Share | None = 0.05
    """The same for the share of answers that are refusals."""
    length: Ratio | None = 1.5
    """The ratio of the typical lengths of answers, in either direction."""
    latency: Ratio | None = 1.5
    """The ratio of the typical times per output token."""
    judge: Annotated[float, Field(ge=0, lt=0.5)] | None = 0.1
    """How far the canary's share of comparisons won may be below one half; a tie counts half."""
    judge_model: ModelName | None = None
    """The base or an adapter that compares answers of the two versions; null: none are."""
    judge_percent: Annotated[float, Field(gt=0, le=100)] = 10.0
    """The share of the alias's requests that the other version answers too, for the judge."""
    min_requests: Annotated[int, Field(ge=20, le=1_000_000)] = 100
    """Of each version, and of the judge's comparisons, before the two are compared."""


class CanaryBody(RequestModel):
    """Sends a part of the alias's requests to another version."""

    version: VersionNumber
    percent: Annotated[float, Field(gt=0, lt=100)]
    limits: CanaryLimitsBody | None = None
    """The canary ends by itself when it exceeds one; null: it stays until the alias changes."""


class AliasBody(RequestModel):
    """The complete new state of the alias; omitting the canary ends it."""

    version: VersionNumber
    canary: CanaryBody | None = None
    override: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = None
    """Why to change the alias although its gate is not passed; the history keeps it."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"version": 3},
        {"version": 3, "canary": {"version": 4, "percent": 10.0}},
        {
            "version": 3,
            "canary": {"version": 4, "percent": 10.0, "limits": {"error_rate": 0.01}},
        },
        {
            "version": 3,
            "canary": {"version": 4, "percent": 10.0, "limits": {"judge_model": "judge@prod"}},
        },
    )


@dataclass(frozen=True, slots=True)
class CanaryLimitsView(AnswerModel):
    """How much worse than the alias's own version the canary may be; null: no limit."""

    error_rate: float | None
    refusals: float | None
    length: float | None
    latency: float | None
    judge: float | None
    judge_model: str | None
    """Null: no answers are judged."""
    judge_percent: float
    min_requests: int


@dataclass(frozen=True, slots=True)
class AliasCanaryView(AnswerModel):
    """The version that gets a part of the alias's requests."""

    version: int
    percent: float
    limits: CanaryLimitsView | None
    """Null: the canary is not watched."""


@dataclass(frozen=True, slots=True)
class AliasView(AnswerModel):
    adapter: str
    alias: str
    version: int
    canary: AliasCanaryView | None
    updated_at: datetime
    object: Literal["adapter.alias"] = "adapter.alias"


@dataclass(frozen=True, slots=True)
class AliasChangeView(AnswerModel):
    """One change of an alias, with the resulting state."""

    alias: str
    action: str
    """`set`, `canary`, `rollback` or `remove`."""
    version: int | None
    """Null if it was removed."""
    canary: AliasCanaryView | None
    changed_at: datetime
    changed_by: str | None
    """The actor: `user:` and an email address, `operator:` and a name, `key:` and the id of a key
    without a user, or `system`; null if unknown."""
    reason: str | None
    """Which limit the canary exceeded, if it ended by itself."""
    evaluation: str | None
    """The id of the evaluation that the gate required; null without a gate."""
    override: str | None
    """Why it was changed although its gate was not passed."""
    object: Literal["adapter.alias.change"] = "adapter.alias.change"
