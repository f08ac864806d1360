"""What crosses the border between the engine and the rest: plain, typed, schema-checked data.

Towards the engine: Submit, Abort, AdapterFetched, AdapterFetchFailed, EvictAdapter, SetPinned,
Prefetch, AdapterStored, ExplainAdapter, ListRequests, MapMemory.
From the engine: EngineReady, StepEvents, AdapterWanted, AdapterRead, AdapterEvicted,
AdapterExplanation, RequestList, MemoryMap, EngineStats, EngineFailed.

Inside one process these objects are passed as they are; between processes `transport` encodes them
as msgpack. Every submitted request ends in exactly one RequestFinished.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..adapters.identity import AdapterKey
from ..adapters.layout import BaseLayout
from ..adapters.manager import Tier
from .config import MAX_DRAFT_TOKENS
from .errors import InvalidParameter
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
    is_retryable: bool | None = None
    """Whether the same request may succeed later; None: as it is published of the code."""


# --- towards the engine -------------------------------------------------------------------------


class Pooling(StrEnum):
    """How the last layer's hidden states of a prompt become one vector."""

    LAST = "last"
    """The last token's, which has seen all others."""
    MEAN = "mean"
    """The mean over all tokens."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How tokens of this request are drafted, where the engine is not to decide by itself."""

    proposer: str | None = None
    """Its name; None: whichever pays. One that the engine does not have refuses the request."""
    num_tokens: int | None = None
    """So many draft tokens a step, whether that pays or not; 0: plain decoding. None: as many as
    pay."""

    def __post_init__(self) -> None:
        if self.num_tokens is not None and not 0 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidParameter(
                "speculation.num_tokens", f"must be from 0 to {MAX_DRAFT_TOKENS}"
            )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `n > 1` is n of these; their prompts meet in the prefix cache.

    With `max_tokens` of 0 nothing is generated: it ends with its prompt.
    """

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
    speculation: SpeculationParams | None = None
    """None: the engine decides."""
    priority: int = 0
    """Within its tenant lower ones run first; between tenants it says nothing."""
    tenant_weight: float = 1.0
    """The tenant's share of the device, in proportion to the others'."""
    deadline_seconds: float | None = None
    """The request must have ended so long after its arrival in the engine; None: whenever."""
    journal_slot: int | None = None
    """Where its tokens are counted in the journal; None: nobody is charged for it."""
    pooling: Pooling | None = None
    """Send the prompt's embedding; `max_tokens` must be 0."""
    num_prompt_logprobs: int | None = None
    """Send log-probabilities of the prompt's tokens but the first, with so many of the likeliest
    ones beside each; None: none. Not together with `pooling`."""
    num_lone_steps: int = 0
    """So many of its first steps are run apart from all other requests: the engine broke down in a
    step of it, or of its adapter or tenant, and is to show whether it does so again."""


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
class DeleteAdapter:
    """Forget this adapter: drop its weights from every tier, and its KV. AdapterEvicted answers.

    No request for it is taken from now on. Those that run have `drain_seconds` to end by
    themselves; whoever is left then, or does not run yet, ends with `adapter_deleted`.
    """

    key: AdapterKey
    drain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SetPinned:
    """These adapters, and no others, are to stay on the device and come back by themselves.

    In the order of preference: pins hold a part of the arena at most (`pins.MAX_PINNED_PART`), and
    those that do not fit into it any more, which a caller who sends the latest first makes the
    least recently pinned, are adapters like any other.
    """

    keys: list[AdapterKey]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring this adapter to the device though no request names it yet, as after a restart.

    It stays `stay_seconds` at least, unless a waiting request needs the room.
    """

    key: AdapterKey
    stay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterStored:
    """The store has this adapter's block anew: what failed before may be tried again at once."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ExplainAdapter:
    """Tell why this adapter is where it is; AdapterExplanation answers."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ListRequests:
    """Tell which requests are in the engine, and what they do; RequestList answers."""

    number: int
    """Comes back with the answer."""
    tenant_id: str | None = None
    """Those of one tenant alone; None: everybody's."""
    limit: int = 500


@dataclass(frozen=True, slots=True)
class MapMemory:
    """Tell where adapters lie, and what KV blocks are used for; MemoryMap answers."""

    number: int
    """Comes back with the answer."""


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
    adapter_load_ms: float | None = None
    """How long the load took that this request waited for; 0 if its adapter was on the device, None
    for the base model."""


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
    rank: int | None = None
    """Of a prompt's token: 1 if none is likelier, and so on."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """What was asked of a part of the prompt that a step has computed; parts come in order."""

    request_id: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's next tokens: of all parts together from its second to its last."""
    embedding: bytes | None = None
    """fp32 `[embedding_size]`, not normalized; only with the last part."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    logits: bytes | None = None
    """fp32 `[vocab_size]`, only for the first token and where `return_logits` was set."""
    num_draft_tokens: int = 0
    """Drafted in the step that gave these; all of them but the last are draft tokens that held."""

    def first(self, num_tokens: int) -> TokensGenerated:
        """What it says of its first tokens."""
        if num_tokens == len(self.token_ids):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:num_tokens]
        return replace(self, token_ids=self.token_ids[:num_tokens], logprobs=logprobs)


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
    num_draft_tokens: int = 0
    """Drafted and verified."""
    num_accepted_tokens: int = 0
    """Of these: they are among the generated."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything that one step has to say; per request in order started, prompt, tokens,
    finished."""

    started: list[RequestStarted] = field(default_factory=list)
    tokens: list[TokensGenerated] = field(default_factory=list)
    finished: list[RequestFinished] = field(default_factory=list)
    prompts: list[PromptRead] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdapterWanted:
    """A request waits for this adapter and no tier of the engine has it."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """The file that AdapterFetched named was read, or could not be: it need not stay."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class EvictionReceipt:
    """What a deletion removed from the engine."""

    device_bytes: int = 0
    """Zeroed on the device."""
    host_bytes: int = 0
    """Zeroed in host memory."""
    num_drained: int = 0
    """Requests that ended by themselves after the deletion had begun."""
    num_aborted: int = 0
    """Requests that ended with `adapter_deleted`."""
    seconds: float = 0.0
    """From EvictAdapter to this answer."""


@dataclass(frozen=True, slots=True)
class AdapterEvicted:
    """The answer to EvictAdapter: no tier of the engine holds this adapter, its bytes are zero."""

    key: AdapterKey
    receipt: EvictionReceipt = field(default_factory=EvictionReceipt)


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
    """Of one that waits, the first thing in its way: one of `request_reports.REASONS`."""
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
class LineUse:
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
    lines: list[LineUse]
    free_bytes: int
    """Of the arena."""
    largest_free_bytes: int
    host_used_bytes: int


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
    """Tokens computed for each tenant, prompt and output, by id; see `tenant_service`."""
    adapter_tiers: AdapterTierStats = field(default_factory=AdapterTierStats)
    speculation: list[SpeculationStats] = field(default_factory=list)
    """Adapters lately used first; a bounded number of them."""
    speculation_totals: list[ProposerTotals] = field(default_factory=list)
    """One for each proposer."""


ToEngine = (
    Submit
    | Abort
    | AdapterFetched
    | AdapterFetchFailed
    | DeleteAdapter
    | SetPinned
    | Prefetch
    | AdapterStored
    | ExplainAdapter
    | ListRequests
    | MapMemory
)
FromEngine = (
    EngineReady
    | StepEvents
    | AdapterWanted
    | AdapterRead
    | AdapterEvicted
    | AdapterExplanation
    | RequestList
    | MemoryMap
    | EngineStats
    | EngineFailed
)
