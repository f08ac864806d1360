"""Events of the engine, its requests and its adapters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from .engine_info import EngineInfo
from .error_info import ErrorInfo
from .resources import NO_RESOURCES, Resources


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was generated."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    ABORTED = "aborted"
    """The caller disconnected or aborted the request."""
    ERROR = "error"
    """See `RequestFinished.error`."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine process could not start or cannot continue; it exits after this message."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request was scheduled for the first time: its adapter is resident and leased."""

    request_id: str
    queue_seconds: float
    """From arrival in the engine to the first step, including the wait for the adapter."""
    adapter_wait_seconds: float
    """The part of `queue_seconds` in which its adapter was not on the device."""
    adapter_tier: Tier | None
    """The adapter's tier when the request arrived; None for the base model."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    adapter_load_ms: float | None = None
    """Duration of the load that this request waited for; 0 if its adapter was on the device, None
    for the base model."""
    replica: str | None = None
    """The ID of the fleet's replica that runs it: the API server adds it. None without a fleet."""
    prefix_wait_seconds: float = 0.0
    """The part of `queue_seconds` until the last piece of a prefix had come that another replica
    has computed; 0 if there was none."""


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
    """For a prompt's token: 1 for the most likely token, and so on."""


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The requested results for a part of the prompt that a step computed. Parts come in order."""

    request_id: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the next tokens of the prompt. All parts together cover its second to its last token."""
    embedding: bytes | None = None
    """fp32 `[embedding_size]`, not normalized, or of a classification `[labels]`, before softmax or
    sigmoid; only with the last part."""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    logits: bytes | None = None
    """fp32, for the first token if `return_logits` was set: of all tokens of the base, and of those
    that adapters of the step add. Minus infinity for a token that the adapter does not have."""
    num_draft_tokens: int = 0
    """Draft tokens of the step. All tokens but the last are accepted draft tokens."""

    def first(self, num_tokens: int) -> TokensGenerated:
        """The same event with only the first `num_tokens` tokens."""
        if num_tokens == len(self.token_ids):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:num_tokens]
        return replace(self, token_ids=self.token_ids[:num_tokens], logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a request; each request has exactly one."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int
    error: ErrorInfo | None = None
    stop_token_id: int | None = None
    """The token that ended the output. It was generated last and is not part of the text."""
    num_draft_tokens: int = 0
    """Verified draft tokens."""
    num_accepted_tokens: int = 0
    """Accepted draft tokens; they are part of the generated tokens."""
    used: Resources = NO_RESOURCES


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All events of one step. The events of a request are in this order: started, prompt, tokens,
    finished."""

    started: list[RequestStarted] = field(default_factory=list)
    tokens: list[TokensGenerated] = field(default_factory=list)
    finished: list[RequestFinished] = field(default_factory=list)
    prompts: list[PromptOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdapterWanted:
    """A request waits for this adapter and no tier of the engine has it."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """The file of AdapterFetched was read, or could not be read. It is no longer needed."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class EvictionReceipt:
    """What a deletion removed from the engine."""

    device_bytes: int = 0
    """Zeroed on the device."""
    host_bytes: int = 0
    """Zeroed in host memory."""
    num_drained: int = 0
    """Requests that finished after the deletion had begun."""
    num_aborted: int = 0
    """Requests that ended with `adapter_deleted`."""
    seconds: float = 0.0
    """From DeleteAdapter to this answer."""


@dataclass(frozen=True, slots=True)
class AdapterEvicted:
    """The answer to DeleteAdapter: no tier of the engine holds this adapter, its bytes are zero."""

    key: AdapterKey
    receipt: EvictionReceipt = field(default_factory=EvictionReceipt)
