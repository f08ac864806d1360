"""Replicas on Ray: one placement group and one actor each, both named after the replica."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .agent_process import AgentReport
from .cluster import NAMESPACE
from .replica_actor import ReplicaActor, ReplicaSpec

PREFIX = "loraplex-replica-"
"""Of the names of placement groups and actors."""
ANSWER_SECONDS = 2.0
_NUM_WANTED = b"num_wanted"


class RayPlacement:
    """Asks Ray's head for everything, so that a restarted controller knows what there is."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._asked: dict[str, Any] = {}
        """Questions that actors have not answered yet: one each."""

    @property
    def num_wanted(self) -> int:
        found: bytes | None = internal_kv._internal_kv_get(_NUM_WANTED, namespace=NAMESPACE)
        return int(found or b"0")

    @num_wanted.setter
    def num_wanted(self, number: int) -> None:
        text = str(number).encode()
        internal_kv._internal_kv_put(_NUM_WANTED, text, overwrite=True, namespace=NAMESPACE)

    def places(self) -> Collection[str]:
        groups = placement_group_table().values()
        return {
            group["name"].removeprefix(PREFIX)
            for group in groups
            if group["name"].startswith(PREFIX) and group["state"] != "REMOVED"
        }

    def add(self, replica_id: str) -> None:
        bundle = {"CPU": self._spec.num_cpus, "GPU": self._spec.num_gpus}
        needed = {name: number for name, number in bundle.items() if number}
        placement_group([needed], name=PREFIX + replica_id, lifetime="detached")

    def start(self, replica_id: str) -> None:
        if self._actor(replica_id) is not None:
            return
        strategy = PlacementGroupSchedulingStrategy(
            get_placement_group(PREFIX + replica_id), placement_group_bundle_index=0
        )
        actor = ray.remote(ReplicaActor).options(
            name=PREFIX + replica_id,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=self._spec.num_cpus,
            num_gpus=self._spec.num_gpus,
            scheduling_strategy=strategy,
        )
        actor.remote(replica_id, self._spec)

    def reports(self) -> Mapping[str, AgentReport]:
        """What they say within ANSWER_SECONDS; of others nothing is known."""
        actors = {each: self._actor(each) for each in self.places()}
        for replica_id, actor in actors.items():
            if actor is not None and replica_id not in self._asked:
                self._asked[replica_id] = actor.report.remote()
        refs = list(self._asked.values())
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS)
        return {
            replica_id: self._answer(replica_id)
            for replica_id, actor in actors.items()
            if actor is not None
        }

    def stop(self, replica_id: str) -> None:
        actor = self._actor(replica_id)
        if actor is not None:
            actor.stop.remote()

    def remove(self, replica_id: str) -> None:
        actor = self._actor(replica_id)
        if actor is not None:
            ray.kill(actor)
        self._asked.pop(replica_id, None)
        remove_placement_group(get_placement_group(PREFIX + replica_id))

    def _actor(self, replica_id: str) -> Any:
        """None if there is none."""
        try:
            return ray.get_actor(PREFIX + replica_id, namespace=NAMESPACE)
        except ValueError:
            return None

    def _answer(self, replica_id: str) -> AgentReport:
        done, _ = ray.wait([self._asked[replica_id]], timeout=0)
        if not done:
            return AgentReport()
        try:
            answer: AgentReport = ray.get(self._asked.pop(replica_id))
            return answer
        except ray.exceptions.RayError as exc:  # the actor ended; Ray or `start` runs it again
            return AgentReport(failure=str(exc))
