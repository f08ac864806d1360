"""What is answered about the memory of this server."""

from __future__ import annotations

import msgspec


class ResidentView(msgspec.Struct, frozen=True):
    """One adapter that the engine knows."""

    tenant: str
    digest: str
    versions: list[str]
    """Names by which it is called: `support-bot@3`. Empty for one that was deleted just now."""
    tier: str
    """The fastest that has it: `device`, `host`, or `store` for both further away."""
    device_bytes: int
    num_leases: int
    """Requests that hold it on the device."""


class TierView(msgspec.Struct, frozen=True):
    """How full a tier is."""

    tier: str
    num_bytes: int
    capacity_bytes: int


class ResidencyView(msgspec.Struct, frozen=True):
    """This server's adapters, most recently used first, and how full its memory is."""

    data: list[ResidentView]
    tiers: list[TierView]
    fragmentation: float
    """Part of the arena's free bytes outside of its largest free run."""
    num_leases: int
    pinned_bytes: int
    kv_usage: float
    """Part of the KV blocks that requests hold."""
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
