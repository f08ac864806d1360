"""What the offline classes return, with the names of vLLM's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import LLMError


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, from the model's unmodified distribution."""

    logprob: float
    rank: int | None
    """1 for the most likely token, and so on; None for a token of the output that is not among the
    requested ones."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Those of one position by token ID: the most likely tokens, and the token that is there."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output for a prompt."""

    index: int
    """Among the `n` of the prompt."""
    text: str
    token_ids: Sequence[int]
    """All tokens, the one that ended the output included."""
    finish_reason: Literal["stop", "length", "error"]
    """`error`: the output is incomplete, see `error`."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it; None: the end-of-sequence
    token or none."""
    cumulative_logprob: float | None = None
    """Of all tokens; None unless `logprobs` was requested."""
    logprobs: Sequence[Logprobs] | None = None
    """For each token; None unless requested."""
    error: LLMError | None = None
    """What ended this output alone; the others are complete."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs for one prompt."""

    request_id: str
    prompt: str | None
    """None: it was token IDs."""
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    """For each token of the prompt; the first has None. None unless requested."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    finished: Literal[True] = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: EmbeddingOutput
    finished: Literal[True] = True
