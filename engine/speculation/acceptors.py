"""Which tokens of a draft are what the target itself would have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, assert_never

from torch import Tensor

from ..config import Acceptance
from ..request import Request
from ..sampler import SamplingRow, sample
from .draft import ROOT


class Accepted(NamedTuple):
    """What the verification of one draft says."""

    path: list[int]
    """Indices of the draft's accepted tokens, each the child of the one before."""
    token_ids: list[int]
    """The accepted tokens, and one more that was drawn behind them."""


class Acceptor(Protocol):
    def accept(self, requests: Sequence[Request], logits: Tensor) -> list[Accepted]:
        """Verify each request's draft; changes nothing.

        `logits`: fp32 and finite, for each request the row of its last known token, then one row
        for each token of its draft.
        """
        ...


class CoupledAcceptor:
    """Accept what equals the target's own draw.

    The noise of a draw follows from (seed, position) alone, so the target's draw at each position
    is known whatever was guessed there: the output is, token for token, that of plain decoding.
    """

    def accept(self, requests: Sequence[Request], logits: Tensor) -> list[Accepted]:
        rows = [row for request in requests for row in sampling_rows(request)]
        drawn = sample(logits, rows)
        accepted, start = [], 0
        for request in requests:
            end = start + 1 + len(request.draft)
            accepted.append(_walk(request, drawn[start:end]))
            start = end
        return accepted


def make_acceptor(acceptance: Acceptance) -> Acceptor:
    match acceptance:
        case Acceptance.COUPLED:
            return CoupledAcceptor()
        case Acceptance.REJECTION:
            raise NotImplementedError
        case _:
            assert_never(acceptance)


def _walk(request: Request, drawn: Sequence[int]) -> Accepted:
    """Down the draft as long as there is a token that equals the draw."""
    path: list[int] = []
    node, tokens = ROOT, [drawn[0]]
    while (child := request.draft.child(node, tokens[-1])) is not None:
        path.append(child)
        tokens.append(drawn[1 + child])
        node = child
    return Accepted(path, tokens)


def sampling_rows(request: Request) -> list[SamplingRow]:
    """What decides the draw behind the last known token, then behind each token of the draft."""
    draft, known = request.draft, request.token_ids
    prefixes: list[Sequence[int]] = [known]
    for index in range(len(draft)):
        prefixes.append([*prefixes[1 + draft.parent(index)], draft.token_ids[index]])
    return [
        SamplingRow(
            params=request.submitted.sampling,
            seed=request.seed,
            token_ids=prefix,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        for prefix in prefixes
    ]
