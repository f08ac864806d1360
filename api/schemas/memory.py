"""Response schemas for the position of adapters and KV blocks.

A tenant sees only its own entries; fields about other tenants are null.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec


class ExtentView(msgspec.Struct, frozen=True):
    """One adapter's bytes in the arena."""

    offset: int | None
    """From the beginning of the arena; null for a tenant."""
    bytes: int
    tenant: str
    adapter: str | None
    """Null, like the version, if the adapter was just deleted."""
    version: int | None
    digest: str
    state: str
    """`leased` by running requests, `idle`, or `loading`."""
    pinned: bool
    leases: int
    idle_seconds: float
    eviction_order: int | None
    """Eviction order, 0 first; null: not evicted, because it is leased or pinned."""


class DeviceMemoryView(msgspec.Struct, frozen=True):
    """The arena: one flat array with one extent per adapter."""

    name: str
    arena_bytes: int | None
    used_bytes: int
    free_bytes: int | None
    largest_free_bytes: int | None
    fragmentation: float | None
    """Share of the free bytes outside of the largest free block."""
    extents: Sequence[ExtentView]
    """Ordered by offset."""


class KvUseView(msgspec.Struct, frozen=True):
    """KV blocks in use by running requests."""

    tenant: str
    adapter: str | None
    """Null for the base model, like the version."""
    version: int | None
    blocks: int


class KvMemoryView(msgspec.Struct, frozen=True):
    """The fullest pool of KV blocks."""

    num_blocks: int | None
    block_size: int
    """Tokens per block."""
    bytes_per_block: int
    free_blocks: int | None
    """Blocks without content."""
    cached_blocks: int | None
    """Blocks of cached prefixes that no request uses now."""
    used_blocks: int
    by_adapter: Sequence[KvUseView]
    """A shared block counts once for each adapter."""


class CachedAdapterView(msgspec.Struct, frozen=True):
    """One adapter in host memory or on disk."""

    tenant: str
    adapter: str | None
    version: int | None
    digest: str
    bytes: int
    pinned: bool
    leases: int
    """Number of current uses; it is not evicted meanwhile."""


class CacheMemoryView(msgspec.Struct, frozen=True):
    """Host memory or the local disk; least recently used first."""

    capacity_bytes: int | None
    used_bytes: int
    entries: Sequence[CachedAdapterView]


class ServerMemoryView(msgspec.Struct, frozen=True):
    """The memory of one server."""

    server_id: str
    seen_at: datetime
    """Time of the report."""
    device: DeviceMemoryView
    kv: KvMemoryView
    host: CacheMemoryView
    disk: CacheMemoryView


class MemoryView(msgspec.Struct, frozen=True):
    """The memory of every live server."""

    servers: Sequence[ServerMemoryView]
