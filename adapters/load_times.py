"""Histograms of load times by stage, with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from .record import State

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds in seconds; one more bucket has none."""
STAGES = {
    State.FETCHING: "fetch",
    State.READING: "read",
    State.HOST: "wait",
    State.LOADING: "copy",
}
"""The stage that an adapter passes while it is in a state."""


@dataclass(frozen=True, slots=True)
class SecondsHistogram:
    """A histogram of durations."""

    bounds: list[float]
    """Upper bounds of the buckets, ascending. One more bucket has none."""
    counts: list[int]
    """The number of durations in each bucket, not cumulated."""
    sum: float


class LoadTimes:
    """A histogram for each stage."""

    def __init__(self) -> None:
        self._counts = {stage: [0] * (len(BOUNDS) + 1) for stage in STAGES.values()}
        self._sums = dict.fromkeys(STAGES.values(), 0.0)

    def add(self, state: State, seconds: float) -> None:
        """Count the time that an adapter spent in a state. Only stages are counted."""
        stage = STAGES.get(state)
        if stage is not None:
            self._counts[stage][bisect_left(BOUNDS, seconds)] += 1
            self._sums[stage] += seconds

    def snapshot(self) -> dict[str, SecondsHistogram]:
        return {
            stage: SecondsHistogram(list(BOUNDS), list(counts), self._sums[stage])
            for stage, counts in self._counts.items()
        }
