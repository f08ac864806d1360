"""A request to generate one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...adapters.identity import AdapterKey
from ..config import MAX_DRAFT_TOKENS
from ..errors import InvalidParameter
from ..kv_policy import KvPolicy
from ..sampling_params import SamplingParams
from .handover import PrefixTransport
from .latency_targets import NO_TARGETS, LatencyTargets


class Pooling(StrEnum):
    """How the last layer's hidden states of a prompt become one vector."""

    LAST = "last"
    """The last token's, which depends on all others."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLASSIFY = "classify"
    """The outputs of the adapter's classification head for the last token's."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Overrides of the engine's choices for speculative decoding."""

    proposer: str | None = None
    """The proposer's name; None: the fastest. An unknown proposer is refused."""
    num_tokens: int | None = None
    """Draft tokens per step, whether or not they make it faster; 0: plain decoding. None: the
    engine's choice."""

    def __post_init__(self) -> None:
        if self.num_tokens is not None and not 0 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidParameter(
                "speculation.num_tokens", f"must be from 0 to {MAX_DRAFT_TOKENS}"
            )

    @property
    def is_off(self) -> bool:
        """Whether nothing is drafted."""
        return self.num_tokens == 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    A request with n choices is n of these, which share their prompt through the prefix cache. With
    `max_tokens` of 0 only the prompt is computed.
    """

    request_id: str
    tenant_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterKey | None = None
    """None is the base model."""
    cache_namespace: str = ""
    """Separates prefixes in the cache within the tenant; attestation probes use their own."""
    adapter_start: int | None = 0
    """The prompt's position from which on the adapter acts; the base computes the tokens before it.
    None: the adapter acts on no token."""
    return_logits: bool = False
    """Send the raw logits of the first generated position, for attestation."""
    group_id: str | None = None
    """Requests of one group have the same prompt, tenant and adapter. The prompt is computed once,
    and the others share its blocks. None: no group."""
    speculation: SpeculationParams | None = None
    """None: the engine's choice."""
    remembers_output: bool = False
    """Its output may be drafted from for later requests of the same adapter version, because its
    tenant keeps it as a sample anyway. No effect for the base."""
    kv_policy: KvPolicy | None = None
    """None: the engine's default."""
    is_endless: bool = False
    """Prompt and output together may exceed the engine's `max_model_len`, the prompt alone not."""
    exports_prefix: bool = False
    """The prompt is computed for another engine: its cached blocks are sent as `PrefixPiece`."""
    prefix_transport: PrefixTransport = PrefixTransport.FRAMES
    """With `exports_prefix`: how the pages travel if there is room for them there."""
    decoded_length: int | None = None
    """With `exports_prefix`: the most tokens, prompt and output, that the request may have which is
    decoded from the prefix. Some bases compute keys by this length."""
    awaits_prefix: bool = False
    """It waits until another engine's last `PrefixPiece` has come."""
    priority: int = 0
    """Lower values run first within the tenant. It has no effect between tenants."""
    tenant_weight: float = 1.0
    """The tenant's weight in the division of the device among tenants."""
    is_background: bool = False
    """It runs only while the engine has no request that is not a background request."""
    deadline_seconds: float | None = None
    """Time from arrival in the engine until the request must have ended; None: no limit."""
    targets: LatencyTargets = NO_TARGETS
    """Where there is none, the engine's holds."""
    is_further: bool = False
    """It belongs to a call whose first request the engine has already: it has no TTFT target, and
    none keeps it out."""
    pooling: Pooling | None = None
    """Send one vector for the prompt; `max_tokens` must be 0."""
    num_prompt_logprobs: int | None = None
    """Send log-probabilities of the prompt's tokens except the first, each with this many most
    likely tokens; None: none. Not with `pooling`."""
    num_lone_steps: int = 0
    """The number of its first steps that run in separate forward passes, because the engine crashed
    in a step of this request, its adapter or its tenant."""

    @property
    def greatest_length(self) -> int:
        """The length by which a base with several rotary contexts computes keys."""
        if self.decoded_length is not None:
            return self.decoded_length
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def has_ttft_target(self) -> bool:
        """Whether a TTFT target is one for this request."""
        return not (self.is_background or self.is_further or self.sampling.max_tokens == 0)

    def uses(self, adapter: AdapterKey) -> bool:
        """Whether it is for this adapter or for a composition of it."""
        return self.adapter is not None and self.adapter.has_part(adapter)

    @property
    def lone_key(self) -> AdapterKey | str:
        """Requests of one key share their separate forward passes: those of one adapter. A request
        for the base has a key of its own."""
        return self.adapter or self.request_id

    vocab_size: int | None = None
    """The number of the adapter's tokens, if it is not the base's."""
    own_end_token_ids: tuple[int, ...] = ()
    """The tokens of the adapter that end an output, besides the base's."""
