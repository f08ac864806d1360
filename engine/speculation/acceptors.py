"""Decides which draft tokens are accepted: coupled or rejection sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, takewhile
from typing import NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from ..config import Acceptance
from ..draft import ROOT
from ..execution.sampler import (
    SamplingRow,
    Stream,
    draw_from,
    probabilities_of,
    row_after,
    sample,
    uniforms,
)
from ..request import Request


class Accepted(NamedTuple):
    """The result of verifying one draft."""

    path: list[int]
    """Indices of the draft's accepted tokens, each the child of the one before."""
    token_ids: list[int]
    """The accepted tokens, and the token sampled after them."""


class Acceptor(Protocol):
    def accept(self, requests: Sequence[Request], logits: Tensor) -> list[Accepted]:
        """Verify each request's draft; changes nothing.

        `logits`: fp32 and finite, for each request the row of its last known token, then one row
        for each token of its draft.
        """
        ...


class CoupledAcceptor:
    """Accept draft tokens that equal the target's own sample.

    The noise of a sample depends on (seed, position) only, so the target's sample at each position
    does not depend on the draft: the output is, token for token, that of plain decoding.
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


class RejectionAcceptor:
    """Accept a draft token with probability min(1, p / q); otherwise sample from the positive part
    of p - q.

    p is the target's distribution at that position, q the one from which the draft token was
    sampled. The output has the distribution of plain decoding (Leviathan et al. 2023, Chen et al.
    2023), and is the same whenever the draft tokens are. A draft token without q is treated as a
    point mass, however it was found. Of a tree only the branch of first children is considered.
    After the last draft token, or without one, the sample is that of plain decoding.
    """

    def accept(self, requests: Sequence[Request], logits: Tensor) -> list[Accepted]:
        branches = list(_first_branches(requests))
        draft_tokens = [draft_token for branch in branches for draft_token in branch.draft_tokens]
        target = probabilities_of(*_at([draft_token.place for draft_token in draft_tokens], logits))
        lengths = _accepted_lengths(branches, _passes(draft_tokens, target))
        starts = accumulate((len(branch.path) for branch in branches), initial=0)
        whole, rejected = [], []
        for branch, start, length in zip(branches, starts, lengths, strict=False):
            if length == len(branch.path):
                whole.append(branch.end)
            else:
                rejected.append(start + length)
        drawn = iter(sample(*_at(whole, logits)))
        corrected = iter(_correct([draft_tokens[index] for index in rejected], target[rejected]))
        return [
            branch.accepted(length, next(drawn if length == len(branch.path) else corrected))
            for branch, length in zip(branches, lengths, strict=True)
        ]


class _Place(NamedTuple):
    """A position at which a token is sampled."""

    row: int
    """The row of the logits."""
    sampling: SamplingRow


class _DraftToken(NamedTuple):
    token: int
    place: _Place
    proposed: Tensor | None
    """`[vocab_size]`: the distribution it was sampled from; None: a point mass."""


class _Branch(NamedTuple):
    """The first branch of a request's draft, which is all of a chain."""

    path: list[int]
    """Indices in the draft."""
    draft_tokens: list[_DraftToken]
    end: _Place
    """The position after the last draft token."""

    def accepted(self, length: int, token: int) -> Accepted:
        """Its first `length` draft tokens, then `token`."""
        drafted = [draft_token.token for draft_token in self.draft_tokens[:length]]
        return Accepted(self.path[:length], [*drafted, token])


def _first_branches(requests: Sequence[Request]) -> Iterator[_Branch]:
    start = 0
    for request in requests:
        draft = request.draft
        places = [_Place(start + row, entry) for row, entry in enumerate(sampling_rows(request))]
        proposed = None if draft.probabilities is None else draft.probabilities.unbind()
        path, draft_tokens, tip = [], [], ROOT
        for index, token in enumerate(draft.token_ids):
            if draft.parent(index) == tip:
                own = None if proposed is None else proposed[index]
                draft_tokens.append(_DraftToken(token, places[1 + tip], own))
                path.append(index)
                tip = index
        yield _Branch(path, draft_tokens, places[1 + tip])
        start += len(places)


def _at(places: Sequence[_Place], logits: Tensor) -> tuple[Tensor, list[SamplingRow]]:
    """The logits of the places, and the other inputs of sampling."""
    return logits[[place.row for place in places]], [place.sampling for place in places]


def _passes(draft_tokens: Sequence[_DraftToken], target: Tensor) -> list[bool]:
    """Which of them pass their own test; `target [num_draft_tokens, vocab_size]`: p."""
    tokens = torch.tensor(
        [draft_token.token for draft_token in draft_tokens], dtype=torch.int64, device=target.device
    )
    p = target.gather(-1, tokens[:, None])[:, 0]
    noise = uniforms(
        [draft_token.place.sampling for draft_token in draft_tokens],
        Stream.ACCEPTANCE,
        target.device,
    )
    passes: list[bool] = accepts(p, _proposed_chances(draft_tokens, tokens), noise).tolist()
    return passes


def accepts(p: Tensor, q: Tensor, noise: Tensor) -> Tensor:
    """Whether to accept a draft token that has probability p under the target and was sampled with
    probability q.

    `noise` is uniform in (0, 1) and independent of everything that the draft token depends on.
    """
    return noise * q < p


def leftover(target: Tensor, proposed: Tensor) -> Tensor:
    """The distribution that replaces a rejected draft token: the positive part of p - q, not
    normalized.

    `[num_draft_tokens, vocab_size]` each. If it is zero except for rounding, p itself.
    """
    more = torch.where(target > proposed, target - proposed, 0.0)
    return torch.where(more.any(-1, keepdim=True), more, target)


def _accepted_lengths(branches: Sequence[_Branch], passes: Sequence[bool]) -> list[int]:
    """The number of draft tokens of each branch before the first that does not pass."""
    remaining = iter(passes)
    own = [list(islice(remaining, len(branch.path))) for branch in branches]
    return [sum(takewhile(bool, flags)) for flags in own]


def _proposed_chances(draft_tokens: Sequence[_DraftToken], tokens: Tensor) -> Tensor:
    """q of each draft token, fp64."""
    chances = torch.ones(len(draft_tokens), dtype=torch.float64, device=tokens.device)
    drawn = [
        index for index, draft_token in enumerate(draft_tokens) if draft_token.proposed is not None
    ]
    if drawn:
        rows = torch.stack(
            [
                draft_token.proposed
                for draft_token in draft_tokens
                if draft_token.proposed is not None
            ]
        )
        chances[drawn] = rows.gather(-1, tokens[drawn, None])[:, 0].double()
    return chances


def _correct(draft_tokens: Sequence[_DraftToken], target: Tensor) -> list[int]:
    """Sample replacements of rejected draft tokens; `target [num_draft_tokens, vocab_size]`: p."""
    proposed = torch.zeros_like(target)
    for row, draft_token in enumerate(draft_tokens):
        if draft_token.proposed is None:
            proposed[row, draft_token.token] = 1.0
        else:
            # An adapter of the step may have more tokens than the proposer knows.
            proposed[row, : len(draft_token.proposed)] = draft_token.proposed
    rows = [draft_token.place.sampling for draft_token in draft_tokens]
    return draw_from(leftover(target, proposed), rows, Stream.CORRECTION)


def make_acceptor(acceptance: Acceptance) -> Acceptor:
    match acceptance:
        case Acceptance.COUPLED:
            return CoupledAcceptor()
        case Acceptance.REJECTION:
            return RejectionAcceptor()
        case _:
            assert_never(acceptance)


def _walk(request: Request, drawn: Sequence[int]) -> Accepted:
    """Follow the draft as long as a token equals the target's sample."""
    path: list[int] = []
    node, tokens = ROOT, [drawn[0]]
    while (child := request.draft.child(node, tokens[-1])) is not None:
        path.append(child)
        tokens.append(drawn[1 + child])
        node = child
    return Accepted(path, tokens)


def sampling_rows(request: Request) -> list[SamplingRow]:
    """The inputs of sampling after the last token, and after each token of the draft."""
    draft = request.draft
    paths = [[], *(draft.path(index) for index in range(len(draft)))]
    return [row_after(request, [draft.token_ids[index] for index in path]) for path in paths]
