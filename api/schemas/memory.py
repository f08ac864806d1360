"""What is answered about where adapters and KV blocks lie.

A tenant sees what is its own; where a field tells of others it is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec


class ExtentView(msgspec.Struct, frozen=True):
    """One adapter's bytes in the arena."""

    offset: int | None
    """From the arena's beginning; null for a tenant."""
    bytes: int
    tenant: str
    adapter: str | None
    """Null for one that was deleted just now, as is the version."""
    version: int | None
    digest: str
    state: str
    """`leased` by running requests, `idle`, or `loading`."""
    pinned: bool
    leases: int
    idle_seconds: float
    eviction_order: int | None
    """0 goes first when room is needed; null stays, as what is leased or pinned does."""


class DeviceMemoryView(msgspec.Struct, frozen=True):
    """The arena: one flat array in which each adapter has one extent."""

    name: str
    arena_bytes: int | None
    used_bytes: int
    free_bytes: int | None
    largest_free_bytes: int | None
    fragmentation: float | None
    """Part of the free bytes outside of the largest free run."""
    extents: Sequence[ExtentView]
    """By offset."""


class KvUseView(msgspec.Struct, frozen=True):
    """Blocks under running requests."""

    tenant: str
    adapter: str | None
    """Null for the base model, as is the version."""
    version: int | None
    blocks: int


class KvMemoryView(msgspec.Struct, frozen=True):
    """The pool of KV blocks; of several the one that is fullest."""

    num_blocks: int | None
    block_size: int
    """Tokens of a block."""
    bytes_per_block: int
    free_blocks: int | None
    """That hold nothing."""
    cached_blocks: int | None
    """That hold a prefix which no request uses now."""
    used_blocks: int
    by_adapter: Sequence[KvUseView]
    """A block that several requests share counts for each adapter once."""


class CachedAdapterView(msgspec.Struct, frozen=True):
    """One adapter in host memory or on disk."""

    tenant: str
    adapter: str | None
    version: int | None
    digest: str
    bytes: int
    pinned: bool
    leases: int
    """How many use it now: it stays meanwhile."""


class CacheMemoryView(msgspec.Struct, frozen=True):
    """Host memory, or the local disk; least recently used first."""

    capacity_bytes: int | None
    used_bytes: int
    entries: Sequence[CachedAdapterView]


class ServerMemoryView(msgspec.Struct, frozen=True):
    """What one server holds."""

    server_id: str
    seen_at: datetime
    """When it was so."""
    device: DeviceMemoryView
    kv: KvMemoryView
    host: CacheMemoryView
    disk: CacheMemoryView


class MemoryView(msgspec.Struct, frozen=True):
    """The memory of every live server."""

    servers: Sequence[ServerMemoryView]
