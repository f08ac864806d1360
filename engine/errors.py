"""Errors of the engine. The class docstring is the default message; `code` is published."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class EngineError(Exception):
    """The engine failed."""

    code: ClassVar[str] = "engine_error"
    retry_after_seconds: float | None = None
    """When it is worth another try, where that is known."""
    is_retryable: bool | None = None
    """Whether the same request may succeed later; None: as it is published of the code."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class NotNow(EngineError):
    """There is no room for this request now."""

    code = "overloaded"

    def __init__(self, message: str | None = None, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(NotNow):
    """More requests wait than the engine takes, or this one could not end by its deadline."""


class TenantQueueFull(NotNow):
    """This tenant has as many requests waiting as one tenant may have."""

    code = "tenant_queue_full"


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it ended."""

    code = "deadline_exceeded"


class RequestQuarantined(EngineError):
    """The engine stopped twice while this request ran, once of them while it ran alone."""

    code = "request_quarantined"


class AdapterQuarantined(EngineError):
    """The engine stopped, or its numbers broke down, repeatedly under this adapter version."""

    code = "adapter_quarantined"


class InvalidParameter(EngineError):
    """A request parameter is out of range."""

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class ProposerNotServed(EngineError):
    """The engine does not run this proposer of tokens."""

    code = "proposer_not_served"
    param = "speculation.proposer"

    def __init__(self, name: str, served: Collection[str]) -> None:
        super().__init__(f"{name} is none of what this engine runs: {', '.join(served) or 'none'}")


class InvalidGrammar(EngineError):
    """The grammar says nothing that an output could follow, or is more than is served."""

    code = "invalid_grammar"


class GrammarNotServed(EngineError):
    """This engine does not serve grammars."""

    code = "grammar_not_served"


class GrammarFailed(EngineError):
    """The output could not follow its grammar any further."""

    code = "grammar_failed"


class PromptTooLong(EngineError):
    """The prompt and the requested output exceed the context length or the KV cache."""

    code = "context_length_exceeded"


class UnsupportedModel(EngineError):
    """The base model, or how it was asked to be served, is not supported."""

    code = "unsupported_model"


class BaseNotFound(UnsupportedModel):
    """There is no base model at this path: give a folder with `config.json`, or a hub id."""

    code = "base_not_found"


class ForeignBase(UnsupportedModel):
    """The folder holds something other than a causal language model saved as safetensors."""

    code = "base_foreign"


class DamagedBase(UnsupportedModel):
    """A file of the base model is damaged, incomplete or missing: download the base again."""

    code = "base_damaged"


class QuantizedBase(UnsupportedModel):
    """The base model is already quantized: serve the original checkpoint, with `--quantize`."""

    code = "base_quantized"


class CompositeBase(UnsupportedModel):
    """The base model reads images, audio or video as well as text: such models are not served."""

    code = "base_composite"


class WeightsMissing(UnsupportedModel):
    """The files lack tensors that the model needs: download the base again, or save it whole."""

    code = "base_weights_missing"


class WeightsUnexpected(UnsupportedModel):
    """The files hold tensors that the model would not use, so its answers would be others."""

    code = "base_weights_unexpected"


class ShapesDiffer(UnsupportedModel):
    """A tensor in the files has another shape than `config.json` says."""

    code = "base_shape_mismatch"


class TokenizerUnusable(UnsupportedModel):
    """The base model has no `tokenizer.json`, or one that cannot be read."""

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


class NumericalError(EngineError):
    """The model's output for this request is not finite."""

    code = "numerical_error"


class AdapterLoadFailed(EngineError):
    """The adapter's weights could not be brought to the device."""

    code = "adapter_load_failed"


class AdapterLost(AdapterLoadFailed):
    """The adapter's stored weights are lost or damaged: push the same files again."""

    is_retryable = False


class AdapterTooLarge(EngineError):
    """The adapter is larger than the memory for all adapters."""

    code = "adapter_too_large"


class AdapterDeleted(EngineError):
    """The adapter was deleted while this request ran."""

    code = "adapter_deleted"


class StaleExtent(EngineError):
    """A scheduled row's adapter is no longer where its lease says."""

    code = "stale_extent"


class EngineRestarted(EngineError):
    """The engine process stopped while this request ran; send it again."""

    code = "engine_restarted"


class EngineUnavailable(EngineError):
    """The engine is not running."""

    code = "engine_unavailable"


class InsufficientMemory(EngineError):
    """Weights, KV cache and adapter arena do not fit into the memory there is."""

    code = "insufficient_memory"


class MalformedMessage(EngineError):
    """A message between the engine and the rest does not follow its schema."""

    code = "malformed_message"
