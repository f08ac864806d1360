"""Mistakes that the simulation's checks must catch: one wrong piece of our router each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaRole, ReplicaState
from loraplex.engine.fleet.router import RoutedRequest, Router

from .checks import Rule, Violation
from .scenario import Size
from .world import World

SIZE = Size(num_replicas=8, num_adapters=200, warm_seconds=1, measured_seconds=8)


class ChoosesDeadReplicas(Router):
    """Learns of new replicas only."""

    def set_state(
        self, name: str, state: ReplicaState, role: ReplicaRole = ReplicaRole.BOTH
    ) -> None:
        if state is ReplicaState.READY:
            super().set_state(name, state, role)


class TakesStatsAsCurrent(Router):
    """Does not count what this server sent since the last report, so that routers herd."""

    def _count_own(self, replica: object, change: int) -> None:
        pass


class SplitsGroups(Router):
    """Chooses for each request of a group anew."""

    def choose(self, request: RoutedRequest, *, leave_out: Collection[str] = ()) -> str:
        alone = RoutedRequest(request.request_id, request.adapter, None, request.block_hashes)
        return super().choose(alone, leave_out=leave_out)


class SendsToTheRefusing(Router):
    """Forgets who refused: a replica that refuses fast looks least loaded."""

    def choose(self, request: RoutedRequest, *, leave_out: Collection[str] = ()) -> str:
        return super().choose(request)


MISTAKES: Mapping[str, tuple[type[Router], Rule]] = {
    "chooses_dead_replicas": (ChoosesDeadReplicas, Rule.READY),
    "takes_stats_as_current": (TakesStatsAsCurrent, Rule.BOUND),
    "splits_groups": (SplitsGroups, Rule.GROUP),
    "sends_to_the_refusing": (SendsToTheRefusing, Rule.NOT_AGAIN),
}
"""Each mistake, and the rule that it breaks."""


def caught_by(name: str) -> Rule | None:
    """None if the rule that the mistake breaks was not seen broken."""
    router, rule = MISTAKES[name]

    def make_router(order: RendezvousOrder, _seed: int) -> Router:
        return router(order)

    # With one router, every request between two reports is its own.
    scenario = replace(SIZE.scenario(seed=1, load=0.85), num_routers=1)
    try:
        World(scenario, make_router, is_checked=True).run()
    except Violation as violation:
        return violation.rule if violation.rule is rule else None
    return None
