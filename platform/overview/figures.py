"""Sums of figures per tenant or server, for one or many time steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .latencies import bucket_of

SUMS = (
    *("num_requests", "num_errors", "prompt_tokens", "output_tokens", "num_cold_loads"),
    *("num_judged", "num_met"),
    *("running_seconds", "waiting_seconds", "kv_block_seconds", "adapter_byte_seconds"),
)
COUNTS = ("first_token_counts", "token_gap_counts", "objective_counts")
MET = "met"
"""The result of a sequence that met its service level objective."""


@dataclass(slots=True)
class FigureSums:
    """The figures of `models.Figures` while they are collected."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_cold_loads: int = 0
    num_judged: int = 0
    """Sequences with a service level objective that have ended; `num_met` of them met it."""
    num_met: int = 0
    running_seconds: float = 0.0
    waiting_seconds: float = 0.0
    kv_block_seconds: float = 0.0
    adapter_byte_seconds: float = 0.0
    first_token_counts: Counter[str] = field(default_factory=Counter)
    token_gap_counts: Counter[str] = field(default_factory=Counter)
    objective_counts: Counter[str] = field(default_factory=Counter)
    """By who set the objective and the result, as `tenant/ttft`; see `ObjectiveMetrics`."""

    def first_token_came(self, seconds: float) -> None:
        """The time after the request."""
        self.first_token_counts[bucket_of(1000 * seconds)] += 1

    def tokens_came_again(self, seconds: float) -> None:
        """The time after the sequence's previous tokens."""
        self.token_gap_counts[bucket_of(1000 * seconds)] += 1

    def objective_judged(self, set_by: str, result: str) -> None:
        """A sequence has met its service level objective, or has not."""
        self.num_judged += 1
        self.num_met += result == MET
        self.objective_counts[f"{set_by}/{result}"] += 1

    def add(self, other: object) -> None:
        """The figures of another one of these, or of a row, on top."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in COUNTS:
            counts: Mapping[str, int] | None = getattr(other, name)
            getattr(self, name).update(counts or {})

    @property
    def is_empty(self) -> bool:
        """Whether nothing was collected."""
        return self == FigureSums()
