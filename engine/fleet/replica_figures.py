"""What an API server writes into the database of how busy a replica is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...adapters.tier import Tier
from ..messages import EngineInfo, EngineStats, RequestStarted

QUEUE_WINDOW_SECONDS = 30.0
MAX_QUEUE_TIMES = 1000


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """As of the replica's last statistics."""

    num_open: int
    """Requests of all API servers."""
    num_running: int
    num_waiting: int
    max_batch: int
    """Requests that it runs at once."""
    queue_p95_seconds: float
    """From arrival to the first step, of the server's own requests in the last 30 s."""
    backlog_seconds: float
    """For the adapters that requests wait for, by their bytes and the replica's pace of loading."""
    kv_usage: float
    """The share of KV blocks that requests hold."""
    num_resident: int
    """Adapters on its device."""
    num_loading: int
    """Adapters that are wanted and not in its memory yet."""
    resident_bytes: int
    arena_bytes: int
    num_adapter_loads: int
    """Since its engine's start."""
    num_restarts: int
    """Of its engine, in the agent's life."""
    device: str


class QueueTimes:
    """The waiting times of the requests that started lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_QUEUE_TIMES)

    def add(self, started: Iterable[RequestStarted]) -> None:
        now = self._clock()
        self._times.extend((now, event.queue_seconds) for event in started)

    def p95(self) -> float:
        """Seconds; 0 if none started in the window."""
        horizon = self._clock() - QUEUE_WINDOW_SECONDS
        seconds = sorted(each for at, each in self._times if at > horizon)
        return seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))] if seconds else 0.0


def figures_of(
    info: EngineInfo,
    stats: EngineStats | None,
    *,
    num_own: int,
    queue_p95_seconds: float,
    backlog_seconds: float,
    num_restarts: int,
) -> ReplicaFigures:
    """`num_own`: the API server's open requests there, which the statistics may not have yet."""
    adapters = stats.adapters if stats else ()
    resident = [each for each in adapters if each.tier is Tier.DEVICE]
    num_running, num_waiting = (stats.num_running, stats.num_waiting) if stats else (0, 0)
    return ReplicaFigures(
        num_open=max(num_own, num_running + num_waiting),
        num_running=num_running,
        num_waiting=num_waiting,
        max_batch=info.max_num_seqs,
        queue_p95_seconds=queue_p95_seconds,
        backlog_seconds=backlog_seconds,
        kv_usage=stats.kv_usage if stats else 0.0,
        num_resident=len(resident),
        num_loading=sum(each.tier in (Tier.STORE, Tier.DISK) for each in adapters),
        resident_bytes=sum(each.device_bytes for each in resident),
        arena_bytes=info.arena_bytes,
        num_adapter_loads=stats.num_adapter_loads if stats else 0,
        num_restarts=num_restarts,
        device=info.device,
    )
