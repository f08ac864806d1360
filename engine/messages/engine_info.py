"""The description of a served engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...adapters.layout import BaseLayout
from ..generation_defaults import GenerationDefaults
from .latency_targets import LatencyTargets


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves; it does not change while the engine runs."""

    base_id: str
    """Hash of the base's configuration, original checkpoint and tokenizer, independent of
    quantization."""
    runtime_id: str
    """Hash of `base_id`, quantization and dtype: the namespace of KV blocks and other derived
    data."""
    layout: BaseLayout
    model_type: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    """Maximum tokens of a sequence, prompt and output together."""
    device: str
    dtype: str
    quantization: str
    num_kv_blocks: int
    kv_block_size: int
    arena_bytes: int
    host_cache_bytes: int
    max_num_seqs: int = 0
    """Maximum sequences of a step."""
    memory_plan: list[str] = field(default_factory=list)
    """How the sizes were computed, as lines to print."""
    proposers: list[str] = field(default_factory=list)
    """The names of the proposers; empty: plain decoding."""
    max_draft_tokens: int = 0
    """Maximum draft tokens per request and step."""
    acceptance: str = "coupled"
    """One of `config.Acceptance`."""
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Of requests that leave sampling parameters out."""
    latency_targets: LatencyTargets = field(default_factory=LatencyTargets)
    serves_grammars: bool = False
    """Whether requests may have a grammar."""
    kv_policy_obstacle: str | None = None
    """Why requests may have no KV policy; None: they may."""
    endless_obstacle: str | None = None
    """Why requests may not exceed `max_model_len`; None: they may."""
    memory_domain: str | None = None
    """Engines with the same one may share memory; None: with none. See `shared_pages`."""
    embedding_size: int = 0
    """The dimension of an embedding."""
    embedding_format: str = "none"
    """The format of the input embedding's weight; none: it is in `dtype`."""
    embedding_bytes: int = 0
    head_format: str = "none"
    """Likewise of the output head's."""
    head_bytes: int = 0
    """0: the embedding's weight serves both."""
    weight_bytes: int = 0
    """Of the whole base as served, over all ranks."""
    num_query_heads: int = 0
    """Of all layers, added up."""
