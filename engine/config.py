"""The configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from .errors import InvalidParameter


class Quantization(StrEnum):
    """How the base model's linear layers are stored and multiplied."""

    NONE = "none"
    INT8 = "int8"
    """Weights int8 with a scale per output channel. Activations int8 with a scale per token on the
    CPU (W8A8), as they are on CUDA (W8A16)."""
    INT4 = "int4"
    """Weights int4 with a scale per output channel and 128 inputs, activations of 16 or 32 bits."""

    @property
    def bits(self) -> Literal[4, 8] | None:
        """Bits per weight; None if it stays in the serving dtype."""
        return {Quantization.NONE: None, Quantization.INT8: 8, Quantization.INT4: 4}[self]


class KvDtype(StrEnum):
    """How keys and values are stored in the cache."""

    AUTO = "auto"
    """In the model's own dtype."""
    INT8 = "int8"
    """A code per element, a scale per token and head."""
    FP8 = "fp8"
    """The same with e4m3 codes, where the device computes them."""


MAX_DRAFT_TOKENS = 64
MAX_READ_ROWS = 256
"""The maximum number of prompt tokens per step whose log-probabilities are requested: each needs a
row of logits."""
PROPOSERS = ("ngram", "draft", "early_exit", "medusa", "medusa_tree")
"""The allowed names in `EngineConfig.speculation`."""


class Acceptance(StrEnum):
    """The acceptance rule of draft tokens. Neither changes the output's distribution."""

    COUPLED = "coupled"
    """Accepts draft tokens that equal the target's own sample: the output is that of plain
    decoding, token for token."""
    REJECTION = "rejection"
    """Accepts by the ratio of probabilities (Leviathan et al. 2023, Chen et al. 2023): more at high
    temperature, but the tokens differ from those of plain decoding."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine's configuration; everything else is derived from the model at start."""

    model: str
    """A directory in the Hugging Face layout, or a hub id."""
    quantization: Quantization = Quantization.NONE
    """How the base's linear layers are stored."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`; auto is the checkpoint's own where the device
    computes it fast, else float32."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    max_model_len: int | None = None
    """None: the model's own length, if it fits."""
    max_num_seqs: int = 64
    """The most sequences in one batch."""
    max_num_batched_tokens: int = 1024
    """The token budget of one step."""
    kv_block_size: int = 16
    """Tokens of a KV block."""
    enforce_eager: bool = False
    """On CUDA, launch every kernel of every step: no step is captured as a graph."""
    memory_bytes: int | None = None
    """The device memory that the engine may use, weights included; None: the free memory, less a
    reserve."""
    arena_bytes: int | None = None
    """Device bytes for adapters; None: a quarter of the memory that remains after the weights."""
    lora_window_bytes: int | None = None
    """On the CPU in half types, bytes for copies of the adapters that decode together; None: a
    sixteenth of `arena_bytes`. Adapters that find no room there decode from the arena, at more time
    a step."""
    kv_cache_bytes: int | None = None
    """Device bytes for KV blocks; None: the rest."""
    host_cache_bytes: int = 1 << 30
    """Bytes of the host memory cache of adapters."""
    num_loader_threads: int = 2
    """Threads that read, copy and zero adapters; one of them is kept for those below 64 MiB."""
    loader_duty: float = 0.1
    """The share of one CPU core that all of these together may use while requests run; 1 and more:
    no limit. See `adapters.loaders.Pace`."""
    num_threads: int | None = None
    """CPU threads of the maths; None: all cores."""
    prefix_caching: bool = True
    """Whether requests reuse prompt prefixes that were computed before."""
    kv_dtype: KvDtype = KvDtype.AUTO
    """How keys and values are stored."""
    swap_bytes: int = 0
    """Host memory for the KV of preempted sequences; 0: they are computed again."""
    attention_window: int | None = None
    """Full-attention layers see only this many positions, and the first `attention_sinks` ones
    (StreamingLLM, Xiao et al. 2023), so memory is bounded however long an output is.

    Positions keep growing and are not renumbered inside the window: an output still ends at
    `max_model_len`.
    """
    attention_sinks: int = 4
    """The number of first positions that remain visible outside `attention_window`."""
    target_itl_ms: float | None = None
    """Prompts share a step with decodes only as far as the step is expected to stay below this."""
    speculation: tuple[str, ...] = ()
    """The proposers, each a name and its argument after a colon: `ngram`, `draft:MODEL`,
    `early_exit:LAYERS`, `medusa:CHECKPOINT`, `medusa_tree:CHECKPOINT`. Empty: plain decoding."""
    max_draft_tokens: int = 8
    """The most tokens drafted for a request in one step."""
    acceptance: Acceptance = Acceptance.COUPLED
    """The acceptance rule of draft tokens."""
    max_queued: int = 4096
    """Requests that wait, over all tenants."""
    max_queued_per_tenant: int = 1024
    """The maximum of these for one tenant."""
    tenant_cap: float = 0.6
    """The part of the sequences, KV blocks and adapter bytes that one tenant may hold while others
    wait for them."""

    @property
    def proposers(self) -> list[str]:
        """The names of the proposers."""
        return [entry.partition(":")[0] for entry in self.speculation]

    @property
    def max_kept_rows(self) -> int:
        """The maximum number of tokens in a step whose logits are computed: the last token of each
        sequence, draft tokens, and tokens of prompts that are read."""
        num_draft_tokens = self.max_draft_tokens if self.speculation else 0
        num_rows = self.max_num_seqs * (1 + num_draft_tokens) + MAX_READ_ROWS
        return min(num_rows, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise InvalidParameter(
                "max_num_batched_tokens", "must exceed max_num_seqs, or prompts would never advance"
            )
        if self.attention_window is not None and self.attention_window < 1:
            raise InvalidParameter("attention_window", "must be at least 1")
        if self.num_loader_threads < 1:
            raise InvalidParameter("num_loader_threads", "must be at least 1")
        if not self.loader_duty > 0:
            raise InvalidParameter("loader_duty", "must be positive")
        if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidParameter("max_draft_tokens", f"must be from 1 to {MAX_DRAFT_TOKENS}")
        if self.attention_sinks < 0:
            raise InvalidParameter("attention_sinks", "must not be negative")
