"""Histograms of load times by stage, with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

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


class Histogram(NamedTuple):
    """`counts` per bucket of BOUNDS and above them; `sum` in seconds."""

    counts: tuple[int, ...]
    sum: float


class LoadTimes:
    """A histogram for each stage."""

    def __init__(self) -> None:
        self._counts = {stage: [0] * (len(BOUNDS) + 1) for stage in STAGES.values()}
        self._sums = dict.fromkeys(STAGES.values(), 0.0)

    def add(self, state: State, seconds: float) -> None:
        """An adapter has left this state for the next one; states that are no stage are ignored."""
        stage = STAGES.get(state)
        if stage is not None:
            self._counts[stage][bisect_left(BOUNDS, seconds)] += 1
            self._sums[stage] += seconds

    def snapshot(self) -> dict[str, Histogram]:
        return {
            stage: Histogram(tuple(counts), self._sums[stage])
            for stage, counts in self._counts.items()
        }
