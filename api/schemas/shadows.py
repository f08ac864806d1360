"""Schemas of an alias's shadow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .aliases import VersionNumber


class ShadowBody(RequestModel):
    """A version that answers copies of a share of the alias's requests."""

    version: VersionNumber
    percent: Annotated[float, Field(gt=0, le=100)]

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"version": 4, "percent": 5.0},)


@dataclass(frozen=True, slots=True)
class ShadowView(AnswerModel):
    """The shadow, and how its answers compare with those of the alias's own version."""

    adapter: str
    alias: str
    version: int
    percent: float
    set_by: str | None
    since: datetime
    """Since then the sums are counted: when the shadow was set, or the alias changed."""
    compared: int
    """Requests that both have answered."""
    errors: int
    """Requests that the shadow failed to answer."""
    equal: int
    """Of those compared: with the same text."""
    rouge_l: float | None
    """The mean ROUGE-L of the two answers, from 0 to 1; null: none are compared."""
    rouge_l_counts: list[int]
    """How many have a ROUGE-L in each tenth: below 0.1, below 0.2, to 1."""
    length_ratio: float | None
    """The typical (geometric mean) ratio of the shadow's output tokens to the other's."""
    object: Literal["adapter.alias.shadow"] = "adapter.alias.shadow"
