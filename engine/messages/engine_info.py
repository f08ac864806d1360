"""A description of the engine, fixed for its life."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...adapters.layout import BaseLayout


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves, fixed for its life."""

    base_id: str
    """Hash of the base's config, original checkpoint and tokenizer, whatever the quantization."""
    runtime_id: str
    """`base_id` with quantization and dtype: the namespace of KV and of derived data."""
    layout: BaseLayout
    model_type: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    """The most tokens of one sequence, prompt and output together."""
    device: str
    dtype: str
    quantization: str
    num_kv_blocks: int
    kv_block_size: int
    arena_bytes: int
    host_cache_bytes: int
    memory_plan: list[str] = field(default_factory=list)
    """The arithmetic behind the sizes, one printable line each."""
    proposers: list[str] = field(default_factory=list)
    """What proposes tokens, by name; empty: plain decoding."""
    max_draft_tokens: int = 0
    """The most tokens drafted for a request in one step."""
    acceptance: str = "coupled"
    """One of `config.Acceptance`."""
    serves_grammars: bool = False
    """Whether requests may have a grammar."""
    embedding_size: int = 0
    """How many numbers an embedding has."""
