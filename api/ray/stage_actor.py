"""The actor of a stage of a replica: runs its ranks on the node where Ray has placed them."""

from __future__ import annotations

import os
import threading

import ray

from ...engine.process.engine_process import engine_environment
from ...engine.ranks.host_ranks import HostRanks, Membership
from .cluster import NAMESPACE, check_addresses

ANSWER_SECONDS = 5.0


class StageActor:
    """Runs the ranks of one stage. If Ray restarts the actor, they join again."""

    def __init__(self, leader: str, first_rank: int, num_ranks: int) -> None:
        """`leader`: the name of the actor of rank 0, which knows where they join.

        Raises ClusterRefused if the node has a public address.
        """
        check_addresses([ray.util.get_node_ip_address()])
        self._leader = leader
        environment = engine_environment(os.environ)
        ranks = range(first_rank, first_rank + num_ranks)
        running = HostRanks(ranks, self._find, environment)
        threading.Thread(target=running.run, daemon=True).start()

    def _find(self) -> Membership | None:
        """Another one after each start of rank 0's actor."""
        try:
            leader = ray.get_actor(self._leader, namespace=NAMESPACE)
            answer: Membership = ray.get(leader.membership.remote(), timeout=ANSWER_SECONDS)
        except (ValueError, ray.exceptions.RayError):  # it starts, or the head is away
            return None
        return answer
