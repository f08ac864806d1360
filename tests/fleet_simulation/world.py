"""The simulated fleet: events in order of time, the routers, the replicas and the faults."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaState
from loraplex.engine.fleet.warm_targets import WarmTargets

from . import scenario as costs
from .checks import Checks
from .outcome import Outcome, percentile
from .policies import Policy
from .replica import SimulatedReplica
from .scenario import Scenario, replica_capacity
from .workload import SimulatedRequest, Workload

MakePolicy = Callable[[RendezvousOrder, int], Policy]
"""From the shared order and a seed."""


class World:
    """One policy under one scenario. With `is_checked`, every choice is checked against the rules
    of our router."""

    def __init__(self, scenario: Scenario, make_policy: MakePolicy, *, is_checked: bool) -> None:
        self._scenario = scenario
        self._workload = Workload(scenario)
        self._random = Random(scenario.seed + 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = count()
        self._now = 0.0
        self._order = RendezvousOrder()
        self._targets = WarmTargets(replica_capacity())
        seeds = range(scenario.num_routers)
        self._routers = [make_policy(self._order, scenario.seed * 100 + each) for each in seeds]
        self._checks = [Checks() for _ in self._routers] if is_checked else []
        self._replicas: dict[str, SimulatedReplica] = {}
        self._measured: list[SimulatedRequest] = []
        self._num_refused = self._num_broken = 0
        self._before = (0, 0, 0.0)

    def run(self) -> Outcome:
        """Raises checks.Violation."""
        scenario = self._scenario
        for number in range(scenario.num_replicas):
            self._order.add(_name(number))
        self._targets.update(self._workload.traffic(), 0.0)
        for number in range(scenario.num_replicas):
            self._join(number)
        self._plan()
        while self._events:
            self._now, _, call = heappop(self._events)
            if self._now > scenario.end:
                break
            call()
        return self._outcome()

    def _at(self, time: float, call: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._tickets), call))

    def _plan(self) -> None:
        scenario = self._scenario
        self._at(self._workload.seconds_to_next(), self._arrive)
        self._at(costs.SHIFT_SECONDS, self._shift)
        self._at(scenario.warm_seconds, self._begin_measuring)
        for time, number in scenario.restarts.items():
            self._at(time, lambda number=number: self._restart(number))  # type: ignore[misc]
        for time, number in scenario.failures.items():
            self._at(time, lambda number=number: self._end(number))  # type: ignore[misc]
        for time, number in scenario.drains.items():
            self._at(time, lambda number=number: self._drain(number))  # type: ignore[misc]
        for number, time in enumerate(scenario.joins, start=scenario.num_replicas):
            self._at(time, lambda number=number: self._join(number))  # type: ignore[misc]

    def _begin_measuring(self) -> None:
        self._before = self._counts()

    def _counts(self) -> tuple[int, int, float]:
        replicas = self._replicas.values()
        return (
            sum(each.num_hits for each in replicas),
            sum(each.num_misses for each in replicas),
            sum(each.num_bytes_loaded for each in replicas),
        )

    # Requests

    def _arrive(self) -> None:
        for request in self._workload.arrival(self._now):
            if self._now >= self._scenario.warm_seconds:
                self._measured.append(request)
            self._route(request)
        self._at(self._now + self._workload.seconds_to_next(), self._arrive)

    def _route(self, request: SimulatedRequest) -> None:
        router = self._routers[request.router]
        refused: set[str] = set()
        while True:
            name = router.choose(request.routed, leave_out=refused)
            if self._checks:
                self._checks[request.router].chosen(request.routed, name, refused)
            replica = self._replicas[name]
            if replica.state is ReplicaState.READY:
                break
            refused.add(name)
            self._num_refused += 1
        router.open(request.routed, name)
        if self._checks:
            self._checks[request.router].opened(request.routed, name)
        replica.submit(request, self._now)

    def _close(self, request: SimulatedRequest, replica: SimulatedReplica) -> None:
        self._routers[request.router].close(request.routed.request_id)
        if self._checks:
            self._checks[request.router].closed(request.routed, replica.name)

    def _shift(self) -> None:
        self._workload.shift()
        self._targets.update(self._workload.traffic(), self._now)
        self._at(self._now + costs.SHIFT_SECONDS, self._shift)

    # Replicas

    def _join(self, number: int) -> None:
        name = _name(number)
        self._order.add(name)
        replica = SimulatedReplica(name, self._workload.bytes_of, self._at, self._close)
        self._replicas[name] = replica
        self._make_ready(replica)
        self._at(
            self._now + self._random.random() * costs.STATS_SECONDS, lambda: self._report(name)
        )

    def _make_ready(self, replica: SimulatedReplica) -> None:
        popular = list(self._workload.traffic())
        wanted = [
            each
            for each in popular
            if replica.name in self._order.of(each)[: self._targets.of(each)]
        ]
        replica.warm(wanted)
        replica.state = ReplicaState.READY
        self._tell(replica)
        self._tell_load(replica)

    def _restart(self, number: int) -> None:
        self._end(number, state=ReplicaState.REFUSING)
        replica = self._replicas[_name(number)]
        self._at(self._now + costs.RESTART_SECONDS, lambda: self._make_ready(replica))

    def _end(self, number: int, *, state: ReplicaState = ReplicaState.GONE) -> None:
        """The engine ends; the routers learn it a moment later."""
        replica = self._replicas[_name(number)]
        replica.state = state
        unbegun, begun = replica.fail()
        self._num_broken += len(begun)
        for request in [*unbegun, *begun]:
            self._close(request, replica)
        for request in unbegun:
            self._route(request)
        self._at(self._now + costs.PUSH_SECONDS, lambda: self._tell(replica))

    def _drain(self, number: int) -> None:
        replica = self._replicas[_name(number)]
        replica.state = ReplicaState.DRAINING
        self._tell(replica)

    def _tell(self, replica: SimulatedReplica) -> None:
        for router in self._routers:
            router.set_state(replica.name, replica.state)
        for checks in self._checks:
            checks.told_ready(replica.name, replica.state is ReplicaState.READY)

    def _report(self, name: str) -> None:
        replica = self._replicas[name]
        if replica.state is ReplicaState.READY:
            self._tell_load(replica)
        self._at(self._now + costs.STATS_SECONDS, lambda: self._report(name))

    def _tell_load(self, replica: SimulatedReplica) -> None:
        stats = replica.stats()
        for router in self._routers:
            router.report(replica.name, stats)
        for checks in self._checks:
            checks.told_load(replica.name, stats)

    # Measures

    def _outcome(self) -> Outcome:
        end = self._scenario.end
        firsts = [
            (end if each.first_token_at is None else each.first_token_at) - each.arrived_at
            for each in self._measured
        ]
        hits, misses, loaded = (
            after - before for after, before in zip(self._counts(), self._before, strict=True)
        )
        return Outcome(
            num_requests=len(firsts),
            hit_rate=hits / (hits + misses),
            ttft_p50_seconds=percentile(firsts, 0.5),
            ttft_p99_seconds=percentile(firsts, 0.99),
            gigabytes_loaded=loaded / 1e9,
            num_waiting=sum(each.num_waiting for each in self._replicas.values()),
            num_refused=self._num_refused,
            num_broken=self._num_broken,
        )


def _name(number: int) -> str:
    return f"r{number:03}"
