"""The wanted number of replicas, on a model of a fleet whose replicas take a minute to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from loraplex.api.ray.autoscaling import DOWN_SECONDS, UP_SECONDS, Autoscaler, ReplicaLoad

BATCH = 64
START_SECONDS = 60.0


@dataclass
class ModelledFleet:
    """Requests in progress, spread evenly over the replicas that serve."""

    minimum: int = 1
    maximum: int = 20
    seconds: float = 0.0
    wanted: int = 2
    history: list[int] = field(default_factory=list)
    """The wanted number of every second."""

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(self.minimum, self.maximum, clock=lambda: self.seconds)
        self.ready_at = [0.0] * self.wanted

    def run(self, seconds: float, num_requests: Callable[[float], float]) -> None:
        """`num_requests` in progress at a time."""
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds += 1.0
            self.wanted = self.autoscaler.wanted(self.wanted, self.loads(num_requests))
            self.ready_at = self.ready_at[: self.wanted]
            while len(self.ready_at) < self.wanted:
                self.ready_at.append(self.seconds + START_SECONDS)
            self.history.append(self.wanted)

    def loads(self, num_requests: Callable[[float], float]) -> list[ReplicaLoad]:
        number = sum(ready <= self.seconds for ready in self.ready_at)
        each = num_requests(self.seconds) / number
        waiting = max(0.0, each - BATCH)
        load = ReplicaLoad(
            batch_fill=each / BATCH,
            kv_usage=min(1.0, 0.8 * each / BATCH),
            queue_p95_seconds=0.1 + waiting / 10,
            backlog_seconds=0.0,
        )
        return [load] * number


def make_load(*, batch_fill: float = 0.1, queue: float = 0.0, backlog: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(batch_fill, 0.1, queue, backlog)


def wanted_each_second(number: int, loads: Sequence[ReplicaLoad], *, seconds: float) -> list[int]:
    """The answers to a fleet that stays as it is."""
    now = 0.0
    autoscaler = Autoscaler(1, 20, clock=lambda: now)
    answers = []
    for now in range(round(seconds)):  # noqa: B007  # the clock reads it
        answers.append(autoscaler.wanted(number, loads))
    return answers


def steadily(number: float) -> Callable[[float], float]:
    return lambda seconds: number


def test_a_jump_of_the_load_gets_enough_replicas_within_seconds() -> None:
    fleet = ModelledFleet()
    fleet.run(60, steadily(1.2 * BATCH))
    assert fleet.wanted == 2
    fleet.run(UP_SECONDS + 2, steadily(6 * BATCH))
    assert 8 <= fleet.wanted <= 9
    fleet.run(DOWN_SECONDS, steadily(6 * BATCH))
    assert 8 <= fleet.wanted <= 9


def test_a_load_that_has_fallen_loses_one_replica_at_a_time() -> None:
    fleet = ModelledFleet(wanted=8)
    fleet.run(4 * DOWN_SECONDS, steadily(1.2 * BATCH))
    steps = [after - before for before, after in pairwise(fleet.history)]
    assert set(steps) == {0, -1}
    places = [index for index, step in enumerate(steps) if step]
    assert all(later - earlier >= DOWN_SECONDS for earlier, later in pairwise(places))
    assert 4 <= fleet.wanted <= 5
    fleet.run(8 * DOWN_SECONDS, steadily(1.2 * BATCH))
    assert fleet.wanted == 3


@pytest.mark.parametrize("mean", [0.5, 0.9, 1.3, 1.5, 2.2])
def test_a_load_that_swings_by_a_third_does_not_change_the_number_forever(mean: float) -> None:
    fleet = ModelledFleet(wanted=4)
    fleet.run(20 * DOWN_SECONDS, lambda s: mean * BATCH * (1.2 if s % 40 < 20 else 0.8))
    settled = fleet.history[len(fleet.history) // 2 :]
    assert len(set(settled)) == 1


def test_a_short_peak_starts_nothing() -> None:
    fleet = ModelledFleet()
    fleet.run(30, steadily(BATCH))
    fleet.run(UP_SECONDS - 2, steadily(9 * BATCH))
    fleet.run(30, steadily(BATCH))
    assert set(fleet.history) == {2}


def test_the_limits_hold() -> None:
    fleet = ModelledFleet(minimum=2, maximum=4, wanted=3)
    fleet.run(300, steadily(50 * BATCH))
    assert fleet.wanted == 4
    fleet.run(10 * DOWN_SECONDS, steadily(0.0))
    assert fleet.wanted == 2
    assert set(fleet.history) <= {2, 3, 4}


def test_a_number_outside_of_the_limits_is_brought_in_at_once() -> None:
    fleet = ModelledFleet(minimum=3, maximum=4, wanted=1)
    fleet.run(1, steadily(0.0))
    assert fleet.wanted == 3


def test_long_queues_add_replicas_although_batches_have_room() -> None:
    busy, calm = make_load(batch_fill=0.2, queue=3.0), make_load(batch_fill=0.2, queue=0.05)
    answers = wanted_each_second(4, [busy, busy, busy, calm], seconds=UP_SECONDS + 3)
    assert answers[0] == 4
    assert 5 in answers


def test_bytes_that_wait_to_be_loaded_add_replicas_although_nothing_starts() -> None:
    # No request that waits for an adapter has started, so there are no queue times.
    loading, calm = make_load(batch_fill=0.2, backlog=3.0), make_load(batch_fill=0.2)
    answers = wanted_each_second(4, [loading, loading, loading, calm], seconds=UP_SECONDS + 3)
    assert answers[0] == 4
    assert 5 in answers


def test_a_backlog_of_one_replica_adds_none_and_keeps_those_that_are_there() -> None:
    loading, idle = make_load(backlog=30.0), make_load()
    answers = wanted_each_second(3, [loading, idle, idle], seconds=3 * DOWN_SECONDS)
    assert set(answers) == {3}


def test_queues_add_nothing_while_replicas_start() -> None:
    busy = make_load(batch_fill=0.5, queue=3.0, backlog=3.0)
    assert set(wanted_each_second(4, [busy, busy, busy], seconds=100)) == {4}


def test_one_replica_with_a_queue_keeps_the_others() -> None:
    queued, idle = make_load(queue=0.5), make_load()
    assert set(wanted_each_second(3, [queued, idle, idle], seconds=3 * DOWN_SECONDS)) == {3}


def test_loads_are_read_from_the_table() -> None:
    figures = {
        "num_running": 30,
        "num_waiting": 50,
        "max_batch": 40,
        "kv_usage": 0.5,
        "queue_p95_seconds": 2.0,
        "backlog_seconds": 4.0,
        "num_open": 81,
    }
    assert ReplicaLoad.from_figures(figures) == ReplicaLoad(2.0, 0.5, 2.0, 4.0)
