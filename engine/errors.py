"""Errors of the engine. The class docstring is the default message; `code` is published."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class EngineError(Exception):
    """The engine failed."""

    code: ClassVar[str] = "engine_error"
    retry_after_seconds: float | None = None
    """Seconds until a retry may succeed, if known."""
    is_retryable: bool | None = None
    """Whether the same request may succeed later; None: as published for the code."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class RankLost(EngineError):
    """A rank of the tensor-parallel group has ended, so the whole group ends and starts again."""


class RankRefused(EngineError):
    """A process is not admitted to the group of ranks."""


class NotNow(EngineError):
    """The server has no capacity for this request now."""

    code = "overloaded"

    def __init__(self, message: str | None = None, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(NotNow):
    """The queue is full, or the request cannot finish by its deadline."""


class TenantQueueFull(NotNow):
    """The tenant has reached its limit of waiting requests."""

    code = "tenant_queue_full"


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"


class RequestQuarantined(EngineError):
    """The engine crashed twice while this request ran, once while it ran alone."""

    code = "request_quarantined"


class AdapterQuarantined(EngineError):
    """The engine repeatedly crashed or computed non-finite values with this adapter version."""

    code = "adapter_quarantined"


class InvalidParameter(EngineError):
    """A request parameter is out of range."""

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class ProposerNotServed(EngineError):
    """This proposer is not active on the server."""

    code = "proposer_not_served"
    param = "speculation.proposer"

    def __init__(self, name: str, served: Collection[str]) -> None:
        super().__init__(
            f"{name} is not active on this server; active: {', '.join(served) or 'none'}"
        )


class KvPolicyNotServed(EngineError):
    """The server does not support KV eviction."""

    code = "kv_policy_not_served"
    param = "kv_policy"


class EndlessNotServed(EngineError):
    """The server does not support outputs beyond its context length."""

    code = "endless_not_served"
    param = "endless"


class InvalidGrammar(EngineError):
    """The grammar cannot be followed by any output, or exceeds the limits."""

    code = "invalid_grammar"


class GrammarNotServed(EngineError):
    """The server does not support schemas and grammars."""

    code = "grammar_not_served"


class GrammarFailed(EngineError):
    """The output can no longer follow its grammar."""

    code = "grammar_failed"


class PromptTooLong(EngineError):
    """The prompt and the requested output exceed the context length or the KV cache."""

    code = "context_length_exceeded"


class UnsupportedModel(EngineError):
    """The base model, or an option it is served with, is not supported."""

    code = "unsupported_model"


class BaseNotFound(UnsupportedModel):
    """Base model not found: give a folder with `config.json`, or a Hugging Face model ID."""

    code = "base_not_found"


class ForeignBase(UnsupportedModel):
    """The folder does not contain a causal language model in safetensors format."""

    code = "base_foreign"


class DamagedBase(UnsupportedModel):
    """A file of the base model is damaged, incomplete or missing: download the base again."""

    code = "base_damaged"


class QuantizedBase(UnsupportedModel):
    """The base model is quantized in a way that is not served: serve the original checkpoint with
    `--quantize`."""

    code = "base_quantized"


class CompositeBase(UnsupportedModel):
    """The base model consists of several parts (text, images, audio), and its text part cannot be
    told from the others: give the text model alone."""

    code = "base_composite"


class WeightsMissing(UnsupportedModel):
    """Tensors are missing from the files: download the base again, or save the whole model."""

    code = "base_weights_missing"


class WeightsUnexpected(UnsupportedModel):
    """The files contain tensors that the model would not use, which would change its answers."""

    code = "base_weights_unexpected"


class ShapesDiffer(UnsupportedModel):
    """A tensor's shape in the files differs from `config.json`."""

    code = "base_shape_mismatch"


class TokenizerUnusable(UnsupportedModel):
    """The base model's `tokenizer.json` is missing or cannot be read."""

    code = "base_tokenizer"


BASE_ERRORS: tuple[type[UnsupportedModel], ...] = (
    UnsupportedModel,
    BaseNotFound,
    ForeignBase,
    DamagedBase,
    QuantizedBase,
    CompositeBase,
    WeightsMissing,
    WeightsUnexpected,
    ShapesDiffer,
    TokenizerUnusable,
)
"""Why a base model is refused: published in `docs/errors.md`."""


class ChatTemplateMissing(EngineError):
    """The base model has no chat template: use plain prompts."""

    code = "chat_template_missing"


class NotAClassifier(EngineError):
    """The model has no classification head; name an adapter that was trained as one."""

    code = "not_a_classifier"


class NumericalError(EngineError):
    """The model's output for this request is not finite."""

    code = "numerical_error"


class AdapterLoadFailed(EngineError):
    """The adapter's weights could not be loaded to the device."""

    code = "adapter_load_failed"


class AdapterLost(AdapterLoadFailed):
    """The adapter's stored weights are lost or damaged: push the same files again."""

    is_retryable = False


class AdapterTooLarge(EngineError):
    """The adapter is larger than the memory reserved for adapters."""

    code = "adapter_too_large"


class AdapterNotComposable(EngineError):
    """An adapter of the composition has more than LoRA matrices."""

    code = "adapter_not_composable"


class AdapterDeleted(EngineError):
    """The adapter was deleted while this request ran."""

    code = "adapter_deleted"


class StaleExtent(EngineError):
    """The adapter moved while the request ran; send it again."""

    code = "stale_extent"


class EngineRestarted(EngineError):
    """The engine stopped while this request ran; send it again."""

    code = "engine_restarted"


class EngineUnavailable(EngineError):
    """The engine is not running."""

    code = "engine_unavailable"


class InsufficientMemory(EngineError):
    """The weights, KV cache and adapter arena do not fit into the available memory."""

    code = "insufficient_memory"


class MalformedMessage(EngineError):
    """A message between the engine and the server does not match its schema."""

    code = "malformed_message"


class ReplicaUnreachable(EngineError):
    """The other machine could not be reached, or did not say hello in time."""

    code = "replica_unreachable"


class ReplicaUntrusted(EngineError):
    """One of the two machines does not accept the other's certificate."""

    code = "replica_untrusted"


class ReplicaIncompatible(EngineError):
    """The other machine has another protocol version, base model, quantization or dtype."""

    code = "replica_incompatible"


class ReplicaReplaced(EngineError):
    """The replica has restarted since its address was looked up, or another one has its address."""

    code = "replica_replaced"


class ReplicaLost(EngineError):
    """The connection to the other machine ended: it was closed or cut, fell silent, or was too
    slow."""

    code = "replica_lost"


LINK_ERRORS: tuple[type[EngineError], ...] = (
    ReplicaUnreachable,
    ReplicaUntrusted,
    ReplicaIncompatible,
    ReplicaReplaced,
    ReplicaLost,
    MalformedMessage,
)
"""Why a link between machines is refused or ends: published in `docs/errors.md`."""
