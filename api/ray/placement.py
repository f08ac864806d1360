"""Where the replicas of a fleet run: what the reconciler needs of Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from .agent_process import AgentReport


class Placement(Protocol):
    """Has a place for each replica, which outlives the process that runs in it."""

    @property
    def num_wanted(self) -> int:
        """The number of replicas that there shall be; kept when the controller ends."""

    @num_wanted.setter
    def num_wanted(self, number: int) -> None: ...

    def places(self) -> Collection[str]:
        """The IDs of the replicas that have a place, in no order."""

    def add(self, replica_id: str) -> None:
        """Make a place; it may take long until there is room for it."""

    def start(self, replica_id: str) -> None:
        """Run the replica's process in its place, if there is none."""

    def reports(self) -> Mapping[str, AgentReport]:
        """How the replicas' processes fare; those that are not there are left out."""

    def stop(self, replica_id: str) -> None:
        """Ask the replica's process to end."""

    def remove(self, replica_id: str) -> None:
        """End the replica's process, if it is there, and give up its place."""
