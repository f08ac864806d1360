"""Prompt lookup: proposes the tokens that followed the last tokens at their earlier occurrence.

It helps for text that quotes, edits or repeats itself (Saxena, "Prompt lookup decoding", 2023; Yang
et al., "Inference with reference", 2023). It needs no model and takes microseconds per draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..draft import NO_DRAFT, Draft
from ..request import Request
from .fair_shares import fair_shares
from .ngram_index import Match, NgramIndex
from .proposer import DraftRequest

MAX_INDEXED_PER_CALL = 4096
"""Tokens read into indices by one call, shared fairly by its requests: a long prompt takes several
steps rather than holding up one, or keeping others from theirs."""
DRAFTS_PER_TOKEN = 2
"""A draft is at most this many times as long as its match: a short match is more often
coincidence."""
WINDOW = 32_768
"""Tokens, at least, that a request's index reaches back; at most it holds twice as many."""


class NgramProposer:
    name = "ngram"
    needs_hidden_states = False

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        indices = [self._index(request) for request, _ in wanted]
        shares = fair_shares((index.num_unread for index in indices), MAX_INDEXED_PER_CALL)
        for (request, num_tokens), index, share in zip(wanted, indices, shares, strict=True):
            index.extend(share)
            match = index.find()
            drafts.append(_copy(request.token_ids, match, num_tokens) if match else NO_DRAFT)
        return drafts

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """Tokens are indexed when a draft is requested, so requests without drafts cost nothing."""

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    @property
    def num_indexed_tokens(self) -> int:
        """Of all requests; a token takes some 150 bytes."""
        return sum(map(len, self._indices.values()))

    def _index(self, request: Request) -> NgramIndex:
        index = self._indices.get(request.request_id)
        num_tokens = len(request.token_ids)
        if index is None or num_tokens - index.start > 2 * WINDOW:
            index = NgramIndex(request.token_ids, start=max(0, num_tokens - WINDOW))
            self._indices[request.request_id] = index
        return index


def _copy(token_ids: Sequence[int], match: Match, num_tokens: int) -> Draft:
    """The tokens that follow the match; past the end of the text the copy continues with its own
    tokens."""
    num_tokens = min(num_tokens, DRAFTS_PER_TOKEN * match.length)
    source = token_ids[match.position : match.position + num_tokens]
    repeated = [*source] * -(-num_tokens // len(source))
    return Draft(tuple(repeated[:num_tokens]))
