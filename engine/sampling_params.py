"""The sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import InvalidParameter
from .grammars.spec import GrammarSpec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 64
MAX_ALLOWED_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence, with the meanings of OpenAI's and vLLM's APIs.

    Raises InvalidParameter on construction if a value is out of range. Stop strings are not here:
    they belong to text, and so to the detokenizer.
    """

    max_tokens: int = 16
    """0: only the prompt is computed."""
    min_tokens: int = 0
    """No end token is sampled among this many first tokens, unless nothing else is allowed."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output does not have: the last token of one is not sampled after the
    others, unless nothing else is allowed."""
    allowed_token_ids: tuple[int, ...] = ()
    """If there are any, no other token is sampled, unless a grammar allows none of them."""
    num_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only. n: also the n most likely tokens'."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """With a grammar: eos is allowed only where nothing else is."""
    grammar: GrammarSpec | None = None
    """The grammar of the whole output; None: any text. An output that `max_tokens`, a stop string
    or a stop token ends is a prefix of a valid output."""

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def limits_tokens(self) -> bool:
        """Whether some tokens are not to be sampled."""
        return bool(self.min_tokens or self.bad_words or self.allowed_token_ids)

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 0, 1 << 20)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_k", self.top_k, 0, 1 << 31)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.num_logprobs is not None:
            _check("logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter("logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100.0, 100.0)
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            message = f"has more than {MAX_ALLOWED_TOKEN_IDS} entries"
            raise InvalidParameter("allowed_token_ids", message)


def _check(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameter(param, f"{value} is outside [{low}, {high}]")
