"""Response schemas for this server's memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.answer_model import AnswerModel
from .memory_tiers import BorderView, PrefixTierView
from .ranks import RankView
from .replicas import ReplicaConnectionView


@dataclass(frozen=True, slots=True)
class ResidentView(AnswerModel):
    """One adapter known to the engine."""

    tenant: str
    digest: str
    versions: list[str]
    """Its names: `support-bot@3`. Empty if it was just deleted."""
    tier: str
    """Its fastest tier: `device`, `host`, or `store` (also for disk)."""
    device_bytes: int
    num_leases: int
    """Requests with a lease on it."""


@dataclass(frozen=True, slots=True)
class TierView(AnswerModel):
    """Usage of a tier."""

    tier: str
    num_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class ConnectedReplicaView(AnswerModel):
    """A replica of this server's fleet."""

    address: str
    connection: ReplicaConnectionView


@dataclass(frozen=True, slots=True)
class ResidencyView(AnswerModel):
    """This server's adapters, most recently used first, and its memory usage."""

    data: list[ResidentView]
    tiers: list[TierView]
    fragmentation: float
    """Share of the arena's free bytes outside of the largest free block."""
    num_leases: int
    pinned_bytes: int
    kv_usage: float
    """Share of the KV blocks in use by requests."""
    device_busy: float
    """Share of the time that the engine spends in steps, since its last snapshot."""
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
    ranks: list[RankView]
    """The processes of a tensor-parallel group; empty without one."""
    prefixes: list[PrefixTierView]
    """The tiers of the prefix cache, the fastest first; in a fleet those of all replicas
    together."""
    border: BorderView
    """Between KV cache and arena; in a fleet the sum over the replicas."""
    replicas: list[ConnectedReplicaView]
    """Of a fleet; empty for a server with an engine of its own."""
