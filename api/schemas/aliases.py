"""Schemas of an adapter's aliases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .adapters import CanaryView

VersionNumber = Annotated[int, Field(ge=1, le=999_999_999)]


class CanaryBody(RequestModel):
    """Sends a part of the alias's requests to another version."""

    version: VersionNumber
    percent: Annotated[float, Field(gt=0, lt=100)]


class AliasBody(RequestModel):
    """The complete new state of the alias; omitting the canary ends it."""

    version: VersionNumber
    canary: CanaryBody | None = None
    override: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = None
    """Why to change the alias although its gate is not passed; the history keeps it."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"version": 3},
        {"version": 3, "canary": {"version": 4, "percent": 10.0}},
    )


@dataclass(frozen=True, slots=True)
class AliasView(AnswerModel):
    adapter: str
    alias: str
    version: int
    canary: CanaryView | None
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
    canary: CanaryView | None
    changed_at: datetime
    changed_by: str | None
    """The actor: `user:` and an email address, `operator:` and a name, `key:` and the id of a key
    without a user, or `system`; null if unknown."""
    evaluation: str | None
    """The id of the evaluation that the gate required; null without a gate."""
    override: str | None
    """Why it was changed although its gate was not passed."""
    object: Literal["adapter.alias.change"] = "adapter.alias.change"
