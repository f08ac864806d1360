"""Answers to ExplainAdapter, ListRequests and MapMemory."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...adapters.identity import AdapterKey
from ...adapters.status import AdapterLoad, ExtentUse, HostUse
from .statistics import RankStats, SpeculationStats


@dataclass(frozen=True, slots=True)
class AdapterExplanation:
    """The answer to ExplainAdapter."""

    load: AdapterLoad
    speculation: list[SpeculationStats] = field(default_factory=list)
    """How well each proposer that has tried proposes for this adapter."""


@dataclass(frozen=True, slots=True)
class RequestState:
    """One sequence in the engine."""

    request_id: str
    tenant_id: str
    adapter: AdapterKey | None
    state: str
    """`waiting`, `prefilling` or `decoding`."""
    waits_for: str | None
    """The first obstacle of a waiting sequence, one of `reports.requests.REASONS`."""
    age_seconds: float
    """Time since its arrival at the engine."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens with keys and values in the KV cache, or on the host if it is swapped."""
    num_generated_tokens: int
    num_preemptions: int
    priority: int


@dataclass(frozen=True, slots=True)
class RequestList:
    """The answer to ListRequests, oldest first."""

    number: int
    requests: list[RequestState]
    num_requests: int
    """Their total number, in the tenant if one was named; may exceed the limit of `requests`."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """The fullest pool of KV blocks."""

    num_blocks: int
    bytes_per_block: int
    num_empty: int
    num_cached: int
    """Blocks that hold a prefix and that no request uses now."""
    num_used: int
    """Blocks that requests hold."""


@dataclass(frozen=True, slots=True)
class AdapterKvUse:
    """The KV blocks of one tenant's requests for one adapter."""

    tenant_id: str
    adapter: AdapterKey | None
    num_running: int
    num_waiting: int
    num_kv_blocks: int
    """A block that several requests share is counted for each."""


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The answer to MapMemory."""

    number: int
    extents: list[ExtentUse]
    """By offset."""
    host: list[HostUse]
    """Least recently used first."""
    kv: KvUse
    lines: list[AdapterKvUse]
    free_bytes: int
    """Free bytes of the arena."""
    largest_free_bytes: int
    host_used_bytes: int
    arena_bytes: int = 0
    """The size of the arena now; see `EngineInfo.arena_bytes`."""
    ranks: list[RankStats] = field(default_factory=list)
    """See `EngineStats.ranks`."""
