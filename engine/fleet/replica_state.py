"""What an API server knows about a replica: its state and its last statistics."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ..messages import ReplicaRole, ReplicaState

__all__ = ["ReplicaRole", "ReplicaState", "ReplicaStats"]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica reports about every 0.5 s."""

    num_requests: int
    """Requests of all API servers that it runs or that wait there."""
    max_batch: int
    """Requests that it runs at once; the others wait."""
    residents: Set[str]
    """Adapters that are in its arena or on their way there."""
    keeps_prefixes: bool = False
    """Whether its disk has cached prefixes, which outlive a restart of its engine."""
