"""How many replicas a fleet wants, from how busy they are: up in seconds, down in minutes.

Ray-free, with the clock as an argument.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

UP_SECONDS = 10.0
"""More replicas are wanted once they have been needed for this time."""
DOWN_SECONDS = 300.0
"""One less is wanted once it has not been needed for this time."""
MAX_WAIT_SECONDS = 1.0
"""Wait of half of the replicas from which there are too few."""
CALM_WAIT_SECONDS = 0.2
"""Wait of every replica below which there may be too many."""
GROWTH = 4
"""Long waits add one replica for each of this number."""


class Target(NamedTuple):
    """The shares that replicas shall reach, as means over the fleet."""

    batch: float
    """Of the requests that run or wait in those that can run at once."""
    kv: float
    """Of the KV blocks that requests hold."""


UP_TARGET = Target(batch=0.75, kv=0.85)
DOWN_TARGET = Target(batch=0.5, kv=0.6)
"""Lower, so that the replicas which remain are not at once too few."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy a replica is."""

    batch_fill: float
    """Requests that run or wait, as a share of those that can run at once; may exceed 1."""
    kv_usage: float
    queue_p95_seconds: float
    backlog_seconds: float
    """For the adapters that requests wait for. While they are loaded, no request that waits for one
    starts, so the queue times do not have its wait yet."""

    @property
    def wait_seconds(self) -> float:
        """That of a request which comes now, or so."""
        return max(self.queue_p95_seconds, self.backlog_seconds)

    @classmethod
    def from_figures(cls, figures: Mapping[str, Any]) -> Self:
        """From what the table of replicas has; see `engine.fleet.replica_figures`."""
        num_requests = figures["num_running"] + figures["num_waiting"]
        return cls(
            batch_fill=num_requests / max(1, figures["max_batch"]),
            kv_usage=figures["kv_usage"],
            queue_p95_seconds=figures["queue_p95_seconds"],
            backlog_seconds=figures["backlog_seconds"],
        )


class _Needed(NamedTuple):
    at: float
    number: int
    """Fewer are too few."""
    spare: int
    """With more, one can go."""


class Autoscaler:
    """Remembers how many replicas were needed lately."""

    def __init__(
        self, minimum: int, maximum: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert 1 <= minimum <= maximum
        self._minimum = minimum
        self._maximum = maximum
        self._clock = clock
        self._needed: deque[_Needed] = deque()
        """Of the last DOWN_SECONDS, since the last change; one look more, which is older."""

    def wanted(self, current: int, loads: Sequence[ReplicaLoad]) -> int:
        """The number for now. `current` are wanted so far; `loads` are of those that serve."""
        now = self._clock()
        self._needed.append(_needed(now, current, loads))
        while len(self._needed) > 1 and self._needed[1].at <= now - DOWN_SECONDS:
            self._needed.popleft()
        wanted = max(self._minimum, min(self._maximum, self._decide(now, current)))
        if wanted != current:
            self._needed.clear()
        return wanted

    def _decide(self, now: float, current: int) -> int:
        first = self._needed[0].at
        if first <= now - UP_SECONDS:
            lately = [each.number for each in self._needed if each.at > now - UP_SECONDS]
            if min(lately) > current:
                return min(lately)
        if first <= now - DOWN_SECONDS and max(each.spare for each in self._needed) < current:
            return current - 1
        return current


def _needed(at: float, current: int, loads: Sequence[ReplicaLoad]) -> _Needed:
    """While some replicas start, waits say nothing yet, and none is to spare."""
    number, spare = _number(loads, UP_TARGET), _number(loads, DOWN_TARGET)
    if len(loads) < current:
        return _Needed(at, number, max(spare, current))
    waits = [each.wait_seconds for each in loads] or [0.0]
    if statistics.median(waits) > MAX_WAIT_SECONDS:
        number = max(number, current + math.ceil(current / GROWTH))
    if max(waits) > CALM_WAIT_SECONDS:
        spare = max(spare, current)
    return _Needed(at, number, spare)


def _number(loads: Sequence[ReplicaLoad], target: Target) -> int:
    """Over how many replicas the load of all would be at the target."""
    by_batch = sum(each.batch_fill for each in loads) / target.batch
    by_kv = sum(each.kv_usage for each in loads) / target.kv
    return max(1, math.ceil(by_batch), math.ceil(by_kv))
