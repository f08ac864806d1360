"""Statistics of the engine: counters since its start and current gauges."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier


@dataclass(frozen=True, slots=True)
class AdapterResidency:
    """Where one adapter is."""

    key: AdapterKey
    tier: Tier
    device_bytes: int
    num_leases: int


@dataclass(frozen=True, slots=True)
class UtilizationStats:
    """How much of the device the steps used, as `utilization` counts it."""

    step_seconds: float = 0.0
    """In which steps ran; idle time is not in it."""
    num_bytes: float = 0.0
    """What the steps had to move."""
    num_flops: float = 0.0
    memory: float = 0.0
    """Part of the peak bandwidth since the last snapshot, while steps ran."""
    compute: float = 0.0
    """Part of the peak arithmetic, likewise."""
    peak_bytes_per_second: float = 0.0
    """What this device reaches, measured at start."""
    peak_flops_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class SecondsHistogram:
    """How often something took how long."""

    bounds: list[float] = field(default_factory=list)
    """Upper bounds of the buckets, ascending; behind them is one more without a bound."""
    counts: list[int] = field(default_factory=list)
    """In each bucket alone."""
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterTierStats:
    """What the engine's adapter tiers hold and how they got it; counters are since its start."""

    bytes_by_tier: dict[Tier, int] = field(default_factory=dict)
    """Held on the device and in host memory."""
    num_leases: int = 0
    leased_bytes: int = 0
    pinned_bytes: int = 0
    """On the device under a pin that is in force."""
    fragmentation: float = 0.0
    """The part of the arena's free bytes that lies outside of the largest free run."""
    evictions: dict[str, int] = field(default_factory=dict)
    """Adapters that left the device, by reason: `adapters.record.Departure`."""
    num_leases_reaped: int = 0
    """Leases whose requests were gone: each is a defect."""
    num_moves: int = 0
    """Adapters moved within the arena so that its free runs join."""
    moved_bytes: int = 0
    load_seconds: dict[str, SecondsHistogram] = field(default_factory=dict)
    """By stage: fetch, read, wait (for room) and copy."""
    hits: dict[Tier, int] = field(default_factory=dict)
    """Requests by where their adapter was when they came."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """How well one proposer proposes under one adapter version, or the base model.

    Counted since the adapter was last remembered: the engine forgets those unused for longest.
    """

    key: AdapterKey | None
    proposer: str
    num_drafts: int
    """That were verified; empty ones are not."""
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance: float
    """Lately, of a draft's first token: between 0 and 1."""
    num_tokens: int
    """How many were to be drafted for a request when that was last decided; 0: it does not pay."""


@dataclass(frozen=True, slots=True)
class ProposerTotals:
    """What one proposer has done for all requests since the engine started; it never shrinks."""

    proposer: str
    num_drafts: int
    """That were verified; empty ones are not."""
    num_draft_tokens: int
    num_accepted_tokens: int
    seconds: float
    """That drafting took, without the verification."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, sent at most twice a second: gauges for the operator and a sign of life."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_free_kv_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_adapter_loads: int
    num_adapter_evictions: int
    adapters: list[AdapterResidency] = field(default_factory=list)
    """Most recently used first."""
    kv_usage: float = 0.0
    """The part of the KV blocks that requests hold; of the pool that is fullest."""
    num_swaps: int = 0
    """Those of `num_preemptions` whose KV went to the host; the others are computed again."""
    num_swapped: int = 0
    """Sequences whose KV is on the host now."""
    num_prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache; `num_cached_tokens` of them were found."""
    num_step_sequences: int = 0
    """Sequences of all steps together: over `num_steps`, how many run at once."""
    num_graph_steps: int = 0
    """Steps that one launch of a captured graph computed: those of few tokens."""
    num_eager_decodes: int = 0
    """Steps of decodes alone that no graph served, on an engine that has graphs."""
    utilization: UtilizationStats = field(default_factory=UtilizationStats)
    tenant_service: list[tuple[str, int]] = field(default_factory=list)
    """Tokens computed for each tenant, prompt and output, by id; see `tenant_labels`."""
    adapter_tiers: AdapterTierStats = field(default_factory=AdapterTierStats)
    speculation: list[SpeculationStats] = field(default_factory=list)
    """Adapters lately used first; a bounded number of them."""
    speculation_totals: list[ProposerTotals] = field(default_factory=list)
    """One for each proposer."""
