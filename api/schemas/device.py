"""Response schemas for this server's memory."""

from __future__ import annotations

import msgspec


class ResidentView(msgspec.Struct, frozen=True):
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


class TierView(msgspec.Struct, frozen=True):
    """Usage of a tier."""

    tier: str
    num_bytes: int
    capacity_bytes: int


class ResidencyView(msgspec.Struct, frozen=True):
    """This server's adapters, most recently used first, and its memory usage."""

    data: list[ResidentView]
    tiers: list[TierView]
    fragmentation: float
    """Share of the arena's free bytes outside of the largest free block."""
    num_leases: int
    pinned_bytes: int
    kv_usage: float
    """Share of the KV blocks in use by requests."""
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
