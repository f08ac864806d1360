"""How a proposer that has logits draws its draft tokens from them, so that many are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from ..config import Acceptance
from ..draft import Draft
from ..execution.grammar_masks import restrict_drafts
from ..execution.sampler import (
    SamplingRow,
    Stream,
    draw_from,
    perturbed,
    probabilities_of,
    row_after,
    sample,
)
from ..request import Request


class DrawnTokens(NamedTuple):
    """One draft token per row."""

    token_ids: list[int]
    probabilities: Tensor | None
    """fp32 `[num_rows, vocab_size]`: what they were drawn from; None: see `Draft.probabilities`."""


class DraftDrawing(Protocol):
    """The strategy that suits an acceptor. With any other the output is right too, only slower."""

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> DrawnTokens:
        """Draft a token per row of the proposer's `logits [num_rows, vocab_size]` (fp32, finite),
        under the request's own parameters: `row_after` gives its row."""
        ...


class CoupledDrawing:
    """With the noise that the target will draw with: where the two distributions agree, so do the
    draws."""

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> DrawnTokens:
        return DrawnTokens(sample(logits, rows), None)


class IndependentDrawing:
    """With noise of its own, and saying from which distribution: rejection sampling takes a draft
    token as a draw that nothing else depends on."""

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> DrawnTokens:
        probabilities = probabilities_of(logits, rows)
        return DrawnTokens(draw_from(probabilities, rows, Stream.DRAFT), probabilities)


def make_drawing(acceptance: Acceptance) -> DraftDrawing:
    match acceptance:
        case Acceptance.COUPLED:
            return CoupledDrawing()
        case Acceptance.REJECTION:
            return IndependentDrawing()
        case _:
            assert_never(acceptance)


@dataclass(eq=False)
class GrowingChain:
    """A request's draft while it is drafted, token by token."""

    request: Request
    num_tokens: int
    """To propose."""
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    """`[vocab_size]` per token, where the acceptor wants them."""

    @property
    def num_missing(self) -> int:
        return self.num_tokens - len(self.token_ids)

    @property
    def wants_more(self) -> bool:
        return self.num_missing > 0

    def draft(self) -> Draft:
        probabilities = torch.stack(self.probabilities) if self.probabilities else None
        return Draft(tuple(self.token_ids), probabilities=probabilities)


def takes_largest(request: Request) -> bool:
    """Whether each of the request's tokens is the one with the largest logit, whatever came before.

    A proposer may draft it without the request's parameters: any drawing gives the same.
    """
    sampling = request.submitted.sampling
    changes_logits = request.has_penalties or request.limits_tokens or sampling.logit_bias
    return sampling.temperature == 0.0 and not changes_logits and request.matcher is None


def draw_next(chains: Sequence[GrowingChain], logits: Tensor, drawing: DraftDrawing) -> None:
    """Give each of them one token more, by its row of a proposer's logits (fp32, finite)."""
    requests = [chain.request for chain in chains]
    draft_tokens = [chain.token_ids for chain in chains]
    rows = list(map(row_after, requests, draft_tokens))
    logits = restrict_drafts(requests, draft_tokens, logits)
    token_ids, probabilities = drawing.draw(rows, logits)
    for index, (chain, token) in enumerate(zip(chains, token_ids, strict=True)):
        chain.token_ids.append(token)
        if probabilities is not None:
            chain.probabilities.append(probabilities[index])


def log_beliefs(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Log-probabilities of each token being the target's sample, whose noise is known.

    A proposer's error is an error in logits, so gaps are measured in logits: at a low temperature
    the sample is not more certain because its perturbed log-weights are further apart.
    """
    scales = [row.params.temperature or 1.0 for row in rows]
    scale = torch.tensor(scales, device=logits.device, dtype=torch.float32)[:, None]
    return (perturbed(logits, rows) * scale).log_softmax(-1)
