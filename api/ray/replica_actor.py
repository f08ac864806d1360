"""The actor of a replica: runs its agent on the node where Ray has placed it."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from ...engine.ranks.host_ranks import Membership
from ...engine.shards.rank_place import GroupShape
from ..settings import load_settings
from .agent_process import AgentProcess, AgentReport
from .cluster import check_addresses
from .stage_rendezvous import StageRendezvous


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What every replica of a fleet is started with. Ray keeps and shows it: it has no secrets."""

    certificates: str
    """The folder of the agent's certificates on each node."""
    agent_options: tuple[str, ...]
    """Those of `loraplex agent` but its address, certificates and data folder."""
    num_cpus: float
    """Of each stage, like `num_gpus`."""
    num_gpus: float
    shape: GroupShape
    """The ranks of a replica."""


class ReplicaActor:
    """Runs an agent at a free port of its node. If Ray restarts the actor, the agent is new."""

    def __init__(self, replica_id: str, spec: ReplicaSpec) -> None:
        """Raises ClusterRefused if the node has a public address."""
        host: str = ray.util.get_node_ip_address()
        check_addresses([host])
        folder = load_settings().data_dir / "replicas" / replica_id
        options = [*("--certificates", spec.certificates, "--data-dir", str(folder))]
        if spec.shape.num_stages > 1:
            self._rendezvous = StageRendezvous(host, folder.with_suffix(".secret"))
            options += self._rendezvous.options(spec.shape)
        self._agent = AgentProcess((*options, *spec.agent_options), host=host)
        self._agent.start()

    def report(self) -> AgentReport:
        return self._agent.report()

    def membership(self) -> Membership:
        """How the ranks of the other stages join."""
        return self._rendezvous.membership

    def stop(self) -> None:
        """Ask the agent to end; `report` says when it has."""
        self._agent.stop()
