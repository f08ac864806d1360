"""The common fields of chat and completion requests: sampling, stopping, streaming."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from ...engine.config import MAX_DRAFT_TOKENS
from ...engine.generation_defaults import GenerationDefaults
from ...engine.grammars.spec import GrammarSpec
from ...engine.kv_policy import MAX_BUDGET, EvictionMethod, KvPolicy
from ...engine.messages import SpeculationParams
from ...engine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from ...engine.text.text_form import TextForm
from ...platform.adapters.composition_names import (
    MAX_MEMBERS,
    MAX_PINNED_LENGTH,
    MAX_WEIGHT,
    NamedMember,
)
from ..contract.request_model import RequestModel, invalid
from .output_format import ResponseFormat, StructuredOutputs
from .slo import SloBody

MAX_CHOICES = 8
MAX_OUTPUT_TOKENS = 1 << 20
MAX_STOP_TOKEN_IDS = 64
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PRIORITY = 1000
MAX_DEADLINE_MS = 24 * 3600 * 1000


def _as_list(value: object) -> object:
    """An empty string has no effect."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _is_short(text: str) -> str:
    if len(text.encode()) > MAX_STOP_BYTES:
        raise ValueError(f"is longer than {MAX_STOP_BYTES} bytes")
    return text


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ProposerName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PINNED_LENGTH)]
OutputTokens = Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
StopString = Annotated[str, AfterValidator(_is_short)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(
        _as_list,
        json_schema_input_type=(
            StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
        ),
    ),
]


BadWord = Annotated[str, AfterValidator(_is_short), Field(min_length=1)]


class StreamOptions(RequestModel):
    include_usage: bool = False

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "continuous_usage_stats": (False,),
        "include_obfuscation": (False, True),
    }


def _as_speculation(value: object) -> object:
    match value:
        case "auto":
            return {}
        case "off":
            return {"num_tokens": 0}
        case str():
            raise ValueError("must be `auto`, `off` or an object")
        case _:
            return value


class Speculation(RequestModel):
    """Speculative decoding settings that replace the engine's choice."""

    proposer: ProposerName | None = None
    """An active proposer; default: the engine chooses."""
    num_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    """Draft tokens per step, whether or not it helps; default: the engine chooses."""


OptionalSpeculation = (
    Annotated[
        Speculation,
        BeforeValidator(
            _as_speculation, json_schema_input_type=Literal["auto", "off"] | Speculation
        ),
    ]
    | None
)


class WeightedAdapter(RequestModel):
    """An adapter of a composition."""

    model: ModelName
    """`[tenant/]adapter[@version|@alias|@sha256:…]`."""
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] | None = None
    """The factor of its delta; default: 1."""


WeightedAdapters = Annotated[list[WeightedAdapter], Field(max_length=MAX_MEMBERS)]


def members_of(adapters: Sequence[WeightedAdapter] | None) -> list[NamedMember]:
    """The adapters that are added to `model`."""
    return [
        NamedMember(each.model, 1.0 if each.weight is None else each.weight)
        for each in adapters or ()
    ]


class KvPolicyBody(RequestModel):
    """KV eviction by attention, in place of the server's default."""

    method: EvictionMethod
    budget: Annotated[int, Field(ge=2, le=MAX_BUDGET)]
    """Tokens that every layer and KV head keeps, each its own; at least 33 with `snapkv`."""


class SamplingBody(RequestModel):
    """Generation parameters of all routes."""

    model: ModelName
    adapters: WeightedAdapters | None = None
    """Their deltas are added to `model`'s."""
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    """No end before: neither end-of-sequence nor a stop token or string."""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts whose tokens do not follow each other in the output."""
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    """The text ends with the stop string or token that ended it."""
    skip_special_tokens: bool | None = None
    """`false`: special tokens are part of the text."""
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Priority among the tenant's own requests: lower values first."""
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """From arrival to the last token."""
    slo: SloBody | None = None
    """Targets for this request, at most as strict as the tenant's."""
    speculation: OptionalSpeculation = None
    kv_policy: KvPolicyBody | None = None
    endless: bool | None = None
    """The output may go on beyond the context length, up to the maximum of tokens, which must be
    given."""
    structured_outputs: StructuredOutputs | None = None

    tolerated: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        }
    )
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "length_penalty": (1.0, 1),
        "return_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    @property
    def speculation_params(self) -> SpeculationParams | None:
        """None: the engine decides."""
        asked = self.speculation
        if asked is None or (asked.proposer is None and asked.num_tokens is None):
            return None
        return SpeculationParams(asked.proposer, asked.num_tokens)

    @property
    def kv_policy_params(self) -> KvPolicy | None:
        """None: the engine's default. Raises InvalidParameter if the budget is too small."""
        asked = self.kv_policy
        return None if asked is None else KvPolicy(asked.method, asked.budget)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def text_form(
        self, *, continues_prompt: bool, visible_token_ids: Collection[int] = ()
    ) -> TextForm:
        """How tokens are converted to the answer's text."""
        return TextForm(
            stop=self.stop_strings,
            includes_stop=bool(self.include_stop_str_in_output),
            num_unstopped_tokens=self.min_tokens or 0,
            continues_prompt=continues_prompt,
            shows_special_tokens=self.skip_special_tokens is False,
            visible_token_ids=visible_token_ids,
        )

    def sampling(
        self,
        *,
        max_tokens: int,
        num_logprobs: int | None,
        grammar: GrammarSpec | None,
        defaults: GenerationDefaults = GenerationDefaults(),
    ) -> SamplingParams:
        """The engine's parameters of the first choice. `defaults`: of what is left out."""
        top_k = defaults.top_k if self.top_k is None else self.top_k
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, defaults.temperature),
            top_k=max(0, top_k),
            top_p=_or(self.top_p, defaults.top_p),
            min_p=_or(self.min_p, defaults.min_p),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=self.seed,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            num_logprobs=num_logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            grammar=grammar,
        )


class GenerationBody(SamplingBody):
    """What `/v1/chat/completions` and `/v1/completions` have in common beside it."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: OutputTokens | None = None
    response_format: ResponseFormat | None = None
    store: bool | None = None
    """`false`: no sample of the request is kept, whatever the adapter's tenant chose."""

    @model_validator(mode="after")
    def check_only_one_form(self) -> Self:
        if self.structured_outputs and self.response_format:
            raise invalid("structured_outputs", "cannot be combined with `response_format`")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def form_grammar(self) -> GrammarSpec | None:
        """What the text of an answer has to follow. Raises InvalidGrammar if it is too long."""
        if self.structured_outputs is not None:
            return self.structured_outputs.spec
        return self.response_format.grammar if self.response_format else None

    @property
    def form_param(self) -> str:
        """The field that says what the text has to follow."""
        return "response_format" if self.response_format else "structured_outputs"

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The schema that the text follows, if it is JSON."""
        return self.response_format.answer_schema if self.response_format else None


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
