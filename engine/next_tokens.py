"""The next token of each request, as the event that tells of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .messages import TokenLogprobs, TokensGenerated
from .request import Request
from .sampler import SamplingRow, logprobs_of, sample


def draw_next_tokens(requests: Sequence[Request], logits: Tensor) -> list[TokensGenerated]:
    """The next token of each request, from its row of `logits`; changes nothing."""
    tokens = sample(logits, [_sampling_row(request) for request in requests])
    wanted = [request.submitted.sampling.num_logprobs for request in requests]
    logprobs = None
    if any(number is not None for number in wanted):
        logprobs = logprobs_of(logits, tokens, max(number or 0 for number in wanted))
    drawn = []
    for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        number, entry = wanted[row], None
        if logprobs and number is not None:
            entry = [TokenLogprobs(logprobs[row].chosen, logprobs[row].top[:number])]
        wants_logits = request.submitted.return_logits and request.num_generated_tokens == 0
        raw = logits[row].cpu().numpy().tobytes() if wants_logits else None
        drawn.append(TokensGenerated(request.request_id, [token], logprobs=entry, logits=raw))
    return drawn


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(
        params=request.submitted.sampling,
        seed=request.seed,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
    )
