"""The sampling parameters of an offline request, with the names and defaults of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from ...engine.grammars.spec import GrammarSpec
from ...engine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
)
from ...engine.sampling_params import SamplingParams as EngineSampling
from ...engine.text.text_form import TextForm
from ..contract.request_model import RequestModel, invalid
from ..schemas.generation import (
    MAX_OUTPUT_TOKENS,
    MAX_STOP_TOKEN_IDS,
    BadWord,
    Bias,
    NumLogprobs,
    Penalty,
    SamplingBody,
    StopStrings,
    TokenId,
)
from ..schemas.output_format import StructuredOutputs
from .errors import llm_error

if TYPE_CHECKING:  # what callers may pass, of which pydantic makes the other
    Stop = str | list[str]
    Structure = StructuredOutputs | Mapping[str, Any]
else:
    Stop = StopStrings
    Structure = StructuredOutputs

_NOT_OF_THE_BODY = {"n", "max_tokens", "logprobs", "prompt_logprobs"}


class SamplingParams(RequestModel):
    """How outputs are sampled. A field means what it means in `POST /v1/completions`; the defaults
    are fixed, as in vLLM. Raises LLMError on construction."""

    n: Annotated[int, Field(ge=1)] = 1
    """Outputs for each prompt."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = 16
    """None: as many as fit. 0: only the prompt is computed, for `prompt_logprobs`."""
    min_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] = 0
    """No output ends before."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | None = None
    """One string or several."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    logprobs: NumLogprobs | None = None
    """The log-probability of each token of the output, and those of so many most likely ones."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for the tokens of the prompt."""
    structured_outputs: Structure | None = None
    """One of `json`, `json_object`, `regex`, `choice` and `grammar`, in a dictionary."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "detokenize": (True,),
        "spaces_between_special_tokens": (True,),
    }

    @model_validator(mode="after")
    def _check_something_is_asked(self) -> Self:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise invalid("max_tokens", "is 0, but `prompt_logprobs` is not set")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _raise_llm_error(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """The last of the validators: it sees the errors of all."""
        try:
            return handler(fields)
        except ValidationError as exc:
            raise llm_error(exc, where="SamplingParams") from exc

    def engine_sampling(self, max_tokens: int) -> EngineSampling:
        """The engine's parameters of the first choice, as the server makes them."""
        return self._body.sampling(
            max_tokens=max_tokens, num_logprobs=self.logprobs, grammar=self._grammar
        )

    def text_form(self, *, continues_prompt: bool) -> TextForm:
        """How tokens are converted to text, as on the server."""
        return self._body.text_form(continues_prompt=continues_prompt)

    @property
    def _body(self) -> SamplingBody:
        """What the server would be sent."""
        sent = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in _NOT_OF_THE_BODY
        }
        return SamplingBody(model="base", **sent)

    @property
    def _grammar(self) -> GrammarSpec | None:
        given = cast(StructuredOutputs | None, self.structured_outputs)
        return None if given is None else given.spec
