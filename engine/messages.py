"""What crosses the border between the engine and the rest: plain, typed, schema-checked data.

Towards the engine: Submit, Abort, AdapterFetched, AdapterFetchFailed, EvictAdapter,
Prefetch.
From the engine: EngineReady, StepEvents, AdapterWanted, AdapterEvicted, EngineStats, EngineFailed.

Inside one process these objects are passed as they are; between processes `transport` encodes them
as msgpack. Every submitted request ends in exactly one RequestFinished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ..adapters.identity import AdapterKey
from ..adapters.layout import BaseLayout
from ..adapters.residency import Tier
from .sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was generated."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    ABORTED = "aborted"
    """The caller went away or asked for the end."""
    ERROR = "error"
    """See `RequestFinished.error`."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data."""

    code: str
    message: str
    retry_after_seconds: float | None = None
    """When it is worth another try, where that is known."""


# --- towards the engine -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `n > 1` is n of these; their prompts meet in the prefix cache."""

    request_id: str
    tenant_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterKey | None = None
    """None is the base model, never "whatever there is"."""
    cache_namespace: str = ""
    """Narrows the prefix cache within the tenant: attestation probes use their own."""
    return_logits: bool = False
    """Send the raw logits of the first generated position: what attestation compares."""
    group_id: str | None = None
    """Requests of one group have the same prompt, tenant and adapter: it is computed once, and the
    others go on from its blocks. None: a request of its own."""
    priority: int = 0
    """Within its tenant lower ones run first; between tenants it says nothing."""
    tenant_weight: float = 1.0
    """The tenant's share of the device, in proportion to the others'."""
    deadline_seconds: float | None = None
    """The request must have ended so long after its arrival in the engine; None: whenever."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request; unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """The answer to AdapterWanted: the verified block lies in this local file."""

    key: AdapterKey
    path: str
    tier: Tier
    """Where the fetcher found it: Tier.STORE or Tier.DISK."""


@dataclass(frozen=True, slots=True)
class AdapterFetchFailed:
    key: AdapterKey
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class EvictAdapter:
    """Forget this adapter: abort its requests, drop its weights from every tier and its KV."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring this adapter to the device though no request names it yet, as after a restart."""

    key: AdapterKey


# --- from the engine ----------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class EngineReady:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine process could not start or cannot go on; it exits behind this message."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request was scheduled for the first time: its adapter is resident and leased."""

    request_id: str
    queue_seconds: float
    """From arrival in the engine to the first schedule, the adapter's wait included."""
    adapter_wait_seconds: float
    """Part of `queue_seconds` in which its adapter was not on the device."""
    adapter_tier: Tier | None
    """Where the adapter was when the request arrived; None for the base model."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the model's unmodified distribution."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    """The most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    logits: bytes | None = None
    """fp32 `[vocab_size]`, only for the first token and where `return_logits` was set."""


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The one terminal event of a request."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int
    error: ErrorInfo | None = None
    stop_token_id: int | None = None
    """The token that ended the output; the last one generated, and not part of the text."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything that one step has to say; per request in order started, tokens, finished."""

    started: list[RequestStarted] = field(default_factory=list)
    tokens: list[TokensGenerated] = field(default_factory=list)
    finished: list[RequestFinished] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdapterWanted:
    """A request waits for this adapter and no tier of the engine has it."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class AdapterEvicted:
    """The answer to EvictAdapter: no tier of the engine holds this adapter, its bytes are zero."""

    key: AdapterKey


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
    arena_used_bytes: int
    host_cache_used_bytes: int
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
    utilization: UtilizationStats = field(default_factory=UtilizationStats)
    tenant_service: list[tuple[str, int]] = field(default_factory=list)
    """Tokens computed for each tenant, prompt and output, by id; see `tenant_service`."""


ToEngine = Submit | Abort | AdapterFetched | AdapterFetchFailed | EvictAdapter | Prefetch
FromEngine = EngineReady | StepEvents | AdapterWanted | AdapterEvicted | EngineStats | EngineFailed
