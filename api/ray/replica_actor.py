"""The actor of a replica: runs its agent on the node where Ray has placed it."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from ..settings import load_settings
from .agent_process import AgentProcess, AgentReport
from .cluster import check_addresses


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What every replica of a fleet is started with. Ray keeps and shows it: it has no secrets."""

    certificates: str
    """The folder of the agent's certificates on each node."""
    agent_options: tuple[str, ...]
    """Those of `loraplex agent` but its address, certificates and data folder."""
    num_cpus: float
    num_gpus: float


class ReplicaActor:
    """Runs an agent at a free port of its node. If Ray restarts the actor, the agent is new."""

    def __init__(self, replica_id: str, spec: ReplicaSpec) -> None:
        """Raises ClusterRefused if the node has a public address."""
        host: str = ray.util.get_node_ip_address()
        check_addresses([host])
        folder = load_settings().data_dir / "replicas" / replica_id
        options = ("--certificates", spec.certificates, "--data-dir", str(folder))
        self._agent = AgentProcess((*options, *spec.agent_options), host=host)
        self._agent.start()

    def report(self) -> AgentReport:
        return self._agent.report()

    def stop(self) -> None:
        """Ask the agent to end; `report` says when it has."""
        self._agent.stop()
