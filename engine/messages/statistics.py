"""Statistics of the engine: counters since its start and current gauges."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...adapters.identity import AdapterKey
from ...adapters.status import AdapterStatus, AdapterTierStats


@dataclass(frozen=True, slots=True)
class UtilizationStats:
    """Use of the device by steps, counted by `memory.utilization`."""

    step_seconds: float = 0.0
    """Total duration of the steps, without idle time."""
    num_bytes: float = 0.0
    """Bytes that the steps had to move."""
    num_flops: float = 0.0
    memory: float = 0.0
    """Share of the peak bandwidth that the steps since the last snapshot used."""
    compute: float = 0.0
    """Share of the peak arithmetic, likewise."""
    busy: float = 0.0
    """Share of the time since the last snapshot that steps took."""
    peak_bytes_per_second: float = 0.0
    """Measured at startup."""
    peak_flops_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """How well one proposer proposes for one adapter version, or the base model.

    The engine keeps the counters of a limited number of adapters and drops the least recently used.
    """

    key: AdapterKey | None
    proposer: str
    num_drafts: int
    """Verified drafts, without empty ones."""
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance: float
    """Recent acceptance rate of a draft's first token, between 0 and 1."""
    num_tokens: int
    """Draft tokens per request, as last decided; 0 if drafting would not be faster."""


@dataclass(frozen=True, slots=True)
class ProposerTotals:
    """Counters of one proposer over all requests since the engine's start."""

    proposer: str
    num_drafts: int
    """Verified drafts, without empty ones."""
    num_draft_tokens: int
    num_accepted_tokens: int
    seconds: float
    """Duration of drafting, without verification."""


@dataclass(frozen=True, slots=True)
class RankStats:
    """The memory of one process of a group."""

    rank: int
    resident_bytes: int
    """Of the process, as the system counts them: weights that are mapped from files included."""
    weight_bytes: int
    kv_bytes: int
    """The size of the KV cache."""
    arena_bytes: int
    """The arena's size."""
    arena_used_bytes: int
    host_bytes: int
    """The size of the adapters' host memory."""
    host_used_bytes: int
    stage: int = 0
    """Of the pipeline. Stage 0 has the first layers."""
    host: str = ""
    """The name of the rank's machine."""
    age_seconds: float = 0.0
    """Since the rank said so. The group ends if a rank is silent for too long."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of counters and gauges, sent at most twice a second."""

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
    adapters: list[AdapterStatus] = field(default_factory=list)
    """Most recently used first. The engine sends those that changed since its last snapshot; its
    client adds the others."""
    gone_adapters: list[AdapterKey] = field(default_factory=list)
    """Those of the last snapshot that are no longer in memory, requested or failed."""
    kv_usage: float = 0.0
    """The share of the fullest pool's KV blocks that requests hold."""
    num_swaps: int = 0
    """Preemptions whose KV blocks were swapped out; the others are recomputed."""
    num_swapped: int = 0
    """Sequences that are swapped out now."""
    num_prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache; `num_cached_tokens` of them were found."""
    num_step_sequences: int = 0
    """The sum of the steps' numbers of sequences."""
    num_graph_steps: int = 0
    """Steps that replayed a captured graph."""
    num_eager_decodes: int = 0
    """Pure decode steps that did not replay a graph, on an engine with graphs."""
    utilization: UtilizationStats = field(default_factory=UtilizationStats)
    tenant_service: list[tuple[str, int]] = field(default_factory=list)
    """Prompt and output tokens computed for each tenant, by id; see `tenant_labels`."""
    adapter_tiers: AdapterTierStats = field(default_factory=AdapterTierStats)
    speculation: list[SpeculationStats] = field(default_factory=list)
    """A limited number of adapters, most recently used first."""
    speculation_totals: list[ProposerTotals] = field(default_factory=list)
    """One for each proposer."""
    device_prefix_bytes: int = 0
    """The bytes of cached prefixes on the device, also of those that requests use now."""
    num_device_prefix_evictions: int = 0
    """KV blocks of prefixes that left the device for other content."""
    host_prefix_bytes: int = 0
    """The bytes of cached prefixes in host memory."""
    host_prefix_capacity_bytes: int = 0
    """The host memory that prefixes and preempted sequences share; 0 without this tier."""
    num_host_prefix_evictions: int = 0
    """Likewise in host memory."""
    bytes_to_host: int = 0
    """Of evicted prefixes."""
    bytes_from_host: int = 0
    """Of prefixes that were copied back."""
    num_blocks_to_host: int = 0
    """KV blocks of evicted prefixes that were copied to host memory."""
    num_blocks_from_host: int = 0
    """KV blocks of prefixes that were copied back."""
    num_host_cached_tokens: int = 0
    """Tokens whose KV was copied back instead of computed, also for preempted requests."""
    disk_prefix_bytes: int = 0
    """The bytes of cached prefixes on disk."""
    disk_prefix_capacity_bytes: int = 0
    """What the disk has room for; 0 without this tier."""
    num_disk_prefix_evictions: int = 0
    """KV blocks of prefixes that left the disk for others."""
    num_disk_cached_tokens: int = 0
    """Tokens for whose KV requests waited until it was read from the disk."""
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    num_blocks_to_disk: int = 0
    """KV blocks of prefixes that were written to the disk."""
    num_blocks_from_disk: int = 0
    """KV blocks of prefixes that were read from the disk."""
    num_blocks_not_to_disk: int = 0
    """KV blocks of prefixes that left the memory before they could be written."""
    num_disk_misreads: int = 0
    """KV blocks on disk that could not be read as they were written."""
    num_disk_waits_given_up: int = 0
    """Requests that computed what the disk did not read in time."""
    num_disks_off: int = 0
    """1 if the disk has failed: no prefix is written or read any more."""
    arena_bytes: int = 0
    """The size of the arena now."""
    kv_cache_bytes: int = 0
    """The size of the KV blocks that requests and prefixes can have now."""
    num_border_moves: int = 0
    """How often the border between the two was moved by a step."""
    host_cache_bytes: int = 0
    """The size of host memory for adapters now."""
    num_host_border_moves: int = 0
    """How often the border in host memory was moved by a step."""
    ranks: list[RankStats] = field(default_factory=list)
    """The processes of a tensor-parallel group, in the order of the ranks; empty without one."""
