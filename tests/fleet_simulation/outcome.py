"""The measures of one simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the measured time. Requests that still wait count with their age as TTFT."""

    num_requests: int
    hit_rate: float
    """Requests for adapters that were on the device when they arrived."""
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    gigabytes_loaded: float
    num_waiting: int
    """Requests without a first token at the end."""
    num_refused: int
    """Choices of a replica that had just ended; each was followed by another choice."""
    num_broken: int
    """Requests that ended with their replica after the first token."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as `share` of all."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
