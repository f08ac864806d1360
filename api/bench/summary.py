"""Throughput and latency percentiles of benchmark runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from statistics import median

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """The times of one request and its chunks, in seconds of one clock."""

    sent: float
    chunks: tuple[float, ...]
    """Arrival of every piece of text: one token, or the tokens of a step with accepted draft
    tokens."""
    output_tokens: int
    """As counted by the server."""

    @property
    def ttft_seconds(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def itl_seconds(self) -> list[float]:
        """The gaps that a client sees: tokens that arrive together have no gap."""
        return [later - earlier for earlier, later in pairwise(self.chunks)]

    @property
    def tpot_seconds(self) -> float | None:
        """The mean time per token after the first; None if there is none."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload: its requests and the wall time from the first request to the last
    end."""

    timings: tuple[RequestTiming, ...]
    wall_seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        return sum(timing.output_tokens for timing in self.timings) / self.wall_seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """Several runs of one workload: the median throughput, latencies over all their requests."""

    output_tokens_per_second: float
    runs: tuple[float, ...]
    """Each run's throughput."""
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    """Between pieces of text."""
    tpot_ms: dict[str, float]
    """Per token, regardless of chunks."""


def summarize(runs: Sequence[Run]) -> Summary:
    """Raises ValueError without runs, or where no request had a second chunk."""
    timings = [timing for run in runs for timing in run.timings]
    throughputs = tuple(run.output_tokens_per_second for run in runs)
    return Summary(
        output_tokens_per_second=median(throughputs),
        runs=throughputs,
        ttft_ms=_percentiles_ms([timing.ttft_seconds for timing in timings]),
        itl_ms=_percentiles_ms([gap for timing in timings for gap in timing.itl_seconds]),
        tpot_ms=_percentiles_ms(
            [timing.tpot_seconds for timing in timings if timing.tpot_seconds is not None]
        ),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of the sorted values, interpolated linearly between neighbours.

    The median of [1, 2] is 1.5. Raises ValueError without values, or beyond 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(seconds, percent) * 1_000 for percent in PERCENTILES}
