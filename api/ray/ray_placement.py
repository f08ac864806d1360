"""Replicas on Ray: a placement group each, and an actor for each stage, named after the replica."""

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
from .stage_actor import StageActor

PREFIX = "loraplex-replica-"
"""Of the names of placement groups and actors."""
_STAGE_PREFIX = "loraplex-stage-"
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
        """One bundle for each stage: on one node if there is room, else on several. A bundle is on
        one node, so the ranks of a stage stay together."""
        bundle = {"CPU": self._spec.num_cpus, "GPU": self._spec.num_gpus}
        needed = {name: number for name, number in bundle.items() if number}
        placement_group(
            [needed] * self._spec.shape.num_stages,
            strategy="PACK",
            name=PREFIX + replica_id,
            lifetime="detached",
        )

    def start(self, replica_id: str) -> None:
        leader, size = PREFIX + replica_id, self._spec.shape.ranks_per_stage
        self._start(ReplicaActor, leader, replica_id, 0, replica_id, self._spec)
        for bundle in range(1, self._spec.shape.num_stages):
            name = _stage_name(replica_id, bundle)
            self._start(StageActor, name, replica_id, bundle, leader, bundle * size, size)

    def _start(
        self, kind: type, name: str, replica_id: str, bundle: int, *arguments: object
    ) -> None:
        """Start an actor in a bundle of a replica's placement group, unless it is there."""
        if _find(name) is not None:
            return
        strategy = PlacementGroupSchedulingStrategy(
            get_placement_group(PREFIX + replica_id), placement_group_bundle_index=bundle
        )
        actor = ray.remote(kind).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=self._spec.num_cpus,
            num_gpus=self._spec.num_gpus,
            scheduling_strategy=strategy,
        )
        actor.remote(*arguments)

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
        stages = range(1, self._spec.shape.num_stages)
        for name in (PREFIX + replica_id, *(_stage_name(replica_id, each) for each in stages)):
            actor = _find(name)
            if actor is not None:
                ray.kill(actor)
        self._asked.pop(replica_id, None)
        remove_placement_group(get_placement_group(PREFIX + replica_id))

    def _actor(self, replica_id: str) -> Any:
        """That of rank 0; None if it does not run."""
        return _find(PREFIX + replica_id)

    def _answer(self, replica_id: str) -> AgentReport:
        done, _ = ray.wait([self._asked[replica_id]], timeout=0)
        if not done:
            return AgentReport()
        try:
            answer: AgentReport = ray.get(self._asked.pop(replica_id))
            return answer
        except ray.exceptions.RayError as exc:  # the actor ended; Ray or `start` runs it again
            return AgentReport(failure=str(exc))


def _stage_name(replica_id: str, bundle: int) -> str:
    return f"{_STAGE_PREFIX}{replica_id}-{bundle}"


def _find(name: str) -> Any:
    """The actor of this name; None if it does not run."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
