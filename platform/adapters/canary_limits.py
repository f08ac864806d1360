"""How much worse than the alias's own version a canary may be before it ends by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ..base import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLimits:
    """Limits on the difference between the two versions of a split alias; None: no limit."""

    error_rate: float | None = 0.02
    """The canary's share of failed requests, less the other version's."""
    refusals: float | None = 0.05
    """The same for the share of answers that are refusals."""
    length: float | None = 1.5
    """The ratio of the mean lengths of answers, in either direction: 1.5 allows 0.67 to 1.5."""
    latency: float | None = 1.5
    """The ratio of the mean times per output token after the first."""
    judge: float | None = 0.1
    """How far the canary's share of won comparisons, a tie counting half, may be below one half."""
    judge_model: str | None = None
    """The model that compares answers of the two versions; None: none are compared."""
    judge_percent: float = 10.0
    """Of the alias's requests, which the other version answers too."""
    min_requests: int = 100
    """Of each version, and of comparisons by the judge, before the two are compared; with fewer
    than 20 the rule's normal approximation is not one."""

    @property
    def judged_by(self) -> str | None:
        """The model that judges; None: nothing is judged."""
        return None if self.judge is None else self.judge_model

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> Self | None:
        """Inverse of `as_json`."""
        return None if fields is None else cls(**fields)

    def as_json(self) -> JsonObject:
        return asdict(self)
