"""A request to generate one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...adapters.identity import AdapterKey
from ..config import MAX_DRAFT_TOKENS
from ..errors import InvalidParameter
from ..sampling_params import SamplingParams


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
