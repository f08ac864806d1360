"""How a proposer that has logits draws its guesses from them, so that many are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, assert_never

from torch import Tensor

from ..config import Acceptance
from ..request import Request
from ..sampler import SamplingRow, Stream, draw_from, probabilities_of, sample


class Drawn(NamedTuple):
    """One guessed token per row."""

    token_ids: list[int]
    probabilities: Tensor | None
    """fp32 `[num_rows, vocab_size]`: what they were drawn from; None: see `Draft.probabilities`."""


class DraftDrawing(Protocol):
    """The strategy that suits an acceptor. With any other the output is right too, only slower."""

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> Drawn:
        """Guess a token per row of the proposer's `logits [num_rows, vocab_size]` (fp32, finite),
        under the request's own parameters: `row_behind` gives its row."""
        ...


class CoupledDrawing:
    """With the noise that the target will draw with: where the two distributions agree, so do the
    draws."""

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> Drawn:
        return Drawn(sample(logits, rows), None)


class IndependentDrawing:
    """With noise of its own, and saying from which distribution: rejection sampling takes a guess
    as a draw that nothing else depends on."""

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> Drawn:
        probabilities = probabilities_of(logits, rows)
        return Drawn(draw_from(probabilities, rows, Stream.DRAFT), probabilities)


def make_drawing(acceptance: Acceptance) -> DraftDrawing:
    match acceptance:
        case Acceptance.COUPLED:
            return CoupledDrawing()
        case Acceptance.REJECTION:
            return IndependentDrawing()
        case _:
            assert_never(acceptance)


def row_behind(request: Request, guesses: Sequence[int]) -> SamplingRow:
    """What decides the draw behind these guesses, were all of them right."""
    return SamplingRow(
        params=request.submitted.sampling,
        seed=request.seed,
        token_ids=[*request.token_ids, *guesses] if guesses else request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
    )
