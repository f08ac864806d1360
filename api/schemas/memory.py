"""Response schemas for the position of adapters and KV blocks.

A tenant sees only its own entries; fields about other tenants are null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ..contract.answer_model import AnswerModel
from .memory_tiers import BorderView, PrefixTierView
from .ranks import RankView


@dataclass(frozen=True, slots=True)
class ExtentView(AnswerModel):
    """One adapter's bytes in the arena."""

    offset: int | None
    """From the beginning of the arena; null for a tenant."""
    bytes: int
    tenant: str
    adapter: str | None
    """Null, like the version, if the adapter was just deleted. Of several with this content, the
    first by name."""
    version: int | None
    names: Sequence[str]
    """Every version with this content, as `name@version`; of a composition, those of all its
    adapters."""
    composition: str | None
    """All adapters of a composition with their weights; null: one adapter."""
    digest: str
    state: str
    """`leased` by running requests, `idle`, or `loading`."""
    pinned: bool
    leases: int
    idle_seconds: float
    eviction_order: int | None
    """Eviction order, 0 first; null: not evicted, because it is leased or pinned."""


@dataclass(frozen=True, slots=True)
class DeviceMemoryView(AnswerModel):
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


@dataclass(frozen=True, slots=True)
class KvUseView(AnswerModel):
    """KV blocks in use by running requests."""

    tenant: str
    adapter: str | None
    """Null for the base model, like the version."""
    version: int | None
    names: Sequence[str]
    """Every version with this content, as `name@version`; of a composition, those of all its
    adapters."""
    composition: str | None
    """All adapters of a composition with their weights; null: one adapter."""
    blocks: int


@dataclass(frozen=True, slots=True)
class KvMemoryView(AnswerModel):
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


@dataclass(frozen=True, slots=True)
class CachedAdapterView(AnswerModel):
    """One adapter in host memory or on disk."""

    tenant: str
    adapter: str | None
    version: int | None
    names: Sequence[str]
    """Every version with this content, as `name@version`; of a composition, those of all its
    adapters."""
    composition: str | None
    """All adapters of a composition with their weights; null: one adapter."""
    digest: str
    bytes: int
    pinned: bool
    leases: int
    """Number of current uses; it is not evicted meanwhile."""


@dataclass(frozen=True, slots=True)
class CacheMemoryView(AnswerModel):
    """Host memory or the local disk; least recently used first."""

    capacity_bytes: int | None
    used_bytes: int
    entries: Sequence[CachedAdapterView]


@dataclass(frozen=True, slots=True)
class TrainerMemoryView(AnswerModel):
    """The process that trains a fine-tuning job."""

    job: str
    """Its id."""
    tenant: str
    adapter: str
    """The adapter of which the result becomes a version."""
    resident_bytes: int
    """Of the process, its copy of the base included."""
    step_bytes: int
    """Estimate of the most that a step takes beside the base; 0 until the data is read."""


@dataclass(frozen=True, slots=True)
class ServerMemoryView(AnswerModel):
    """The memory of one server."""

    server_id: str
    seen_at: datetime
    """Time of the report."""
    plan: Sequence[str]
    """How memory was divided at start, and which layers run fused; empty for a tenant."""
    ranks: Sequence[RankView]
    """The processes of a tensor-parallel group; empty without one, and for a tenant."""
    device: DeviceMemoryView
    kv: KvMemoryView
    prefixes: Sequence[PrefixTierView]
    """The tiers of the prefix cache, the fastest first; empty for a tenant."""
    border: BorderView | None
    """Between KV cache and arena; null for a tenant, and before the engine's first report."""
    host: CacheMemoryView
    disk: CacheMemoryView
    trainers: Sequence[TrainerMemoryView]
    """Of the fine-tuning jobs that this server trains now."""


@dataclass(frozen=True, slots=True)
class MemoryView(AnswerModel):
    """The memory of every live server."""

    servers: Sequence[ServerMemoryView]
