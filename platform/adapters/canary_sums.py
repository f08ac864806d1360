"""What is counted of the requests of one version of a split alias."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple


class Split(NamedTuple):
    """An alias with a watched canary, from one change of the alias to its next."""

    tenant_id: str
    adapter_id: str
    adapter_name: str
    alias: str
    change_number: int


class Arm(NamedTuple):
    """One of the two versions of a split alias."""

    split: Split
    is_canary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One request that has ended."""

    is_error: bool = False
    is_refusal: bool | None = None
    """None: it is no answer."""
    num_tokens: int = 0
    """Output tokens of an answer."""
    token_seconds: float | None = None
    """The time per output token after the first; None if there was no second."""


@dataclass(slots=True)
class ArmSums:
    """Sums over the requests of one version. Lengths and times are summed as logarithms, so that
    single long answers and slow requests do not decide."""

    num_requests: int = 0
    num_errors: int = 0
    num_answers: int = 0
    num_refusals: int = 0
    num_lengths: int = 0
    """Answers with output tokens."""
    log_length_sum: float = 0.0
    log_length_squares: float = 0.0
    num_times: int = 0
    """Answers with at least two output tokens."""
    log_time_sum: float = 0.0
    log_time_squares: float = 0.0
    num_judged: int = 0
    """Comparisons with the other version by the judge; of a canary only."""
    score_sum: float = 0.0
    score_squares: float = 0.0

    def add(self, seen: Observation) -> None:
        self.num_requests += 1
        self.num_errors += seen.is_error
        if seen.is_refusal is None:
            return
        self.num_answers += 1
        self.num_refusals += seen.is_refusal
        if seen.num_tokens:
            length = math.log(seen.num_tokens)
            self.num_lengths += 1
            self.log_length_sum += length
            self.log_length_squares += length * length
        if seen.token_seconds:
            time = math.log(seen.token_seconds)
            self.num_times += 1
            self.log_time_sum += time
            self.log_time_squares += time * time

    def add_score(self, score: float) -> None:
        """A comparison by the judge: 1 if it prefers this version in both orders of the answers, 0
        if the other; 0.5 is a tie."""
        self.num_judged += 1
        self.score_sum += score
        self.score_squares += score * score


SUMS = tuple(field.name for field in fields(ArmSums))
"""The names of the sums."""
