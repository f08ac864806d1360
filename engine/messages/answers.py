"""Answers to ExplainAdapter, ListRequests and MapMemory."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from .error_info import ErrorInfo
from .statistics import SpeculationStats


@dataclass(frozen=True, slots=True)
class AdapterTransition:
    """One change in the life of an adapter inside the engine."""

    state: str
    """As in `AdapterExplanation.state`."""
    seconds_ago: float
    reason: str | None = None
    """Why, where it is more than the next step of a load: a failure's code, or the eviction's."""


@dataclass(frozen=True, slots=True)
class AdapterExplanation:
    """The answer to ExplainAdapter: where an adapter is, and what it waits for."""

    key: AdapterKey
    state: str
    """One of `adapters.record.State`, or `stored`: nobody has asked for it, or `deleting`."""
    tier: Tier
    """The fastest that has it."""
    since_seconds: float | None
    """How long it has been in this state; None if it was never in another."""
    reason: ErrorInfo | None
    """Why the last attempt failed."""
    retry_in_seconds: float | None
    """When a request may begin the next attempt, if the last one failed."""
    order: int
    """Loads ahead of this one, 0 if it does not wait."""
    needed_bytes: int | None
    """Its size on the device; None while no tier of the engine has it."""
    free_bytes: int
    """Of the arena."""
    largest_free_bytes: int
    """The largest free run in one piece."""
    leased_bytes: int
    """Under leases of running requests: what cannot make room now."""
    is_pinned: bool
    transitions: list[AdapterTransition] = field(default_factory=list)
    """The last ones, oldest first."""
    speculation: list[SpeculationStats] = field(default_factory=list)
    """How well its tokens are drafted, by each proposer that has tried."""


@dataclass(frozen=True, slots=True)
class RequestState:
    """One sequence in the engine."""

    request_id: str
    tenant_id: str
    adapter: AdapterKey | None
    state: str
    """`waiting`, `prefilling` or `decoding`."""
    waits_for: str | None
    """Of one that waits, the first thing in its way: one of `reports.requests.REASONS`."""
    age_seconds: float
    """Since it came to the engine."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Whose keys and values are there; of one that is swapped, on the host."""
    num_generated_tokens: int
    num_preemptions: int
    priority: int


@dataclass(frozen=True, slots=True)
class RequestList:
    """The answer to ListRequests, the oldest first."""

    number: int
    requests: list[RequestState]
    num_requests: int
    """All there are, of the tenant if one was named: more than `requests` if the limit cut it."""


@dataclass(frozen=True, slots=True)
class ExtentUse:
    """One adapter's place in the arena."""

    key: AdapterKey
    offset_bytes: int
    num_bytes: int
    state: str
    """`leased`, `idle` or `loading`."""
    is_pinned: bool
    num_leases: int
    idle_seconds: float
    """Since it was last used; 0 while it is leased or on its way."""
    eviction_order: int | None
    """0 for who would make room first; None for who stays."""


@dataclass(frozen=True, slots=True)
class HostUse:
    """One adapter's block in host memory."""

    key: AdapterKey
    num_bytes: int
    is_pinned: bool
    is_in_use: bool


@dataclass(frozen=True, slots=True)
class KvUse:
    """The pool of KV blocks; of several the one that is fullest."""

    num_blocks: int
    bytes_per_block: int
    num_empty: int
    num_cached: int
    """That hold a prefix which no request uses now."""
    num_used: int
    """That requests hold."""


@dataclass(frozen=True, slots=True)
class AdapterKvUse:
    """What one tenant's requests for one adapter hold."""

    tenant_id: str
    adapter: AdapterKey | None
    num_running: int
    num_waiting: int
    num_kv_blocks: int
    """A block that several requests share counts for each."""


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
    """Of the arena."""
    largest_free_bytes: int
    host_used_bytes: int
