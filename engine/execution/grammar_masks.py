"""Applies grammars to logits: a forbidden token has the logit minus infinity.

So penalties, biases, temperature and filters apply to the remaining tokens, and every sampler
(greedy, coupled or rejection) uses the model's distribution conditioned on the grammar.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import GrammarFailed
from ..grammars.matcher import Executor, Matcher
from ..request import Request
from ..transfers import to_device

BITS_PER_WORD = 32
FORBIDDEN = float("-inf")


class Restricted(NamedTuple):
    """The masked logits of a step, for sampling."""

    logits: Tensor
    failed: Mapping[Request, GrammarFailed]
    """The requests whose grammar could not be followed; their samples are meaningless."""


def restrict(
    requests: Sequence[Request], logits: Tensor, executor: Executor, vocab_size: int
) -> Restricted:
    """Mask each row by the state of the grammar after its token.

    One of the requests at least has a grammar. `logits`: for each request the row of its last
    token, then one for each token of its draft. They are not modified. `vocab_size`: the tokens
    that grammars know; of others, which adapters add, they allow only those that end the output.
    """
    sizes = [1 + len(request.draft) for request in requests]
    roots = {
        row: request
        for request, row in zip(requests, accumulate(sizes, initial=0), strict=False)
        if request.matcher is not None
    }
    masks = _Masks(logits, vocab_size)
    masks.fill_all({row: _matcher(request) for row, request in roots.items()}, executor)
    for row, request in roots.items():
        for index in _matcher(request).walk(request.draft):
            masks.fill(row + 1 + index, _matcher(request))
    empty = masks.are_empty(roots)
    failed = {
        request: GrammarFailed()
        for is_empty, request in zip(empty, roots.values(), strict=True)
        if is_empty or _matcher(request).has_failed
    }
    return Restricted(masks.applied(), failed)


def restrict_drafts(
    requests: Sequence[Request], draft_tokens: Sequence[Sequence[int]], logits: Tensor
) -> Tensor:
    """A proposer's logits `[len(requests), vocab_size]` after each request's draft tokens, masked
    in the same way; unmasked after draft tokens that are invalid or end the output."""
    if all(request.matcher is None for request in requests):
        return logits
    masks = _Masks(logits, logits.shape[1])
    for row, (request, drafted) in enumerate(zip(requests, draft_tokens, strict=True)):
        if (matcher := request.matcher) is not None:
            with matcher.behind(drafted) as is_there:
                if is_there:
                    masks.fill(row, matcher)
    return masks.applied()


def _matcher(request: Request) -> Matcher:
    assert request.matcher is not None
    return request.matcher


class _Masks:
    """For each filled row of the logits, a bit per token, set if the token is allowed."""

    def __init__(self, logits: Tensor, vocab_size: int) -> None:
        self._logits = logits
        self._vocab_size = vocab_size
        self._matchers: dict[int, Matcher] = {}
        num_words = -(-vocab_size // BITS_PER_WORD)
        self._words = torch.empty(len(logits), num_words, dtype=torch.int32)
        self._row_bytes = self._words.shape[1] * self._words.element_size()

    def fill(self, row: int, matcher: Matcher) -> None:
        """Fill the row by the matcher's current state."""
        self._matchers[row] = matcher
        pointer = self._words.data_ptr() + row * self._row_bytes
        matcher.automaton.unsafe_compute_mask_ptr(pointer, self._row_bytes)

    def fill_all(self, matchers: Mapping[int, Matcher], executor: Executor) -> None:
        self._matchers |= matchers
        executor.unsafe_compute_mask_ptr(
            [(matcher.automaton, row) for row, matcher in matchers.items()],
            self._words.data_ptr(),
            self._row_bytes,
            len(self._words),
        )

    def are_empty(self, rows: Iterable[int]) -> list[bool]:
        """For each row, whether no token is allowed, which never happens with a correct grammar."""
        empty: list[bool] = (self._words[list(rows)] == 0).all(-1).tolist()
        return empty

    def applied(self) -> Tensor:
        """The logits, a copy, with the filled rows masked."""
        if not self._matchers:
            return self._logits
        rows = sorted(self._matchers)
        allowed = self._allowed(rows)
        if len(rows) == len(self._logits):
            return torch.where(allowed, self._logits, FORBIDDEN)
        chosen = to_device(rows, self._logits.device)
        restricted = torch.where(allowed, self._logits[chosen], FORBIDDEN)
        return self._logits.index_copy(0, chosen, restricted)

    def _allowed(self, rows: Sequence[int]) -> Tensor:
        """bool `[len(rows), vocab_size]`"""
        octets = to_device(self._words[rows].view(torch.uint8), self._logits.device).long()
        flags = to_device(_OCTETS, octets.device).take(octets).view(torch.bool)
        allowed = flags[:, : self._vocab_size]
        if num_added := self._logits.shape[1] - self._vocab_size:
            allowed = F.pad(allowed, (0, num_added))
        _allow_ends(allowed, [self._matchers[row] for row in rows])
        return allowed


def _flags_of_octets() -> Tensor:
    """For each octet its bits as eight bools, the lowest first, which are one int64 `[256]`."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return bits.bool().view(torch.int64).flatten()


_OCTETS = _flags_of_octets()


def _allow_ends(allowed: Tensor, matchers: Sequence[Matcher]) -> None:
    """If one end token is allowed, all are; with `ignore_eos` only if nothing else is allowed."""
    alike: dict[frozenset[int], list[int]] = defaultdict(list)
    for row, matcher in enumerate(matchers):
        alike[matcher.end_token_ids].append(row)
    if len(alike) == 1:
        _allow_equal_ends(allowed, matchers)
        return
    for rows in alike.values():  # adapters have ends of their own
        chosen = to_device(rows, allowed.device)
        own = allowed[chosen]
        _allow_equal_ends(own, [matchers[row] for row in rows])
        allowed.index_copy_(0, chosen, own)


def _allow_equal_ends(allowed: Tensor, matchers: Sequence[Matcher]) -> None:
    """The same for matchers with the same end tokens."""
    ends = to_device(sorted(matchers[0].end_token_ids), allowed.device)
    may_end = allowed[:, ends].any(-1)
    if any(matcher.ignores_end for matcher in matchers):
        ignores_end = to_device([matcher.ignores_end for matcher in matchers], allowed.device)
        goes_on = allowed.index_fill(1, ends, False).any(-1)
        may_end &= ~(ignores_end & goes_on)
    allowed[:, ends] = may_end[:, None]
