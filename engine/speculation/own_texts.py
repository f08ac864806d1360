"""Repetitions within each request's own text. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .fair_shares import fair_shares
from .ngram_index import Match, NgramIndex

if TYPE_CHECKING:
    from ..request import Request

DRAFTS_PER_TOKEN = 2
"""A draft is at most this many times as long as its match: a short match is more often
coincidence."""
MAX_INDEXED_PER_CALL = 4096
"""Tokens read into indices by one call, shared fairly by its requests: a long prompt takes several
steps rather than holding up one, or keeping others from theirs."""
WINDOW = 32_768
"""Tokens, at least, that a request's index reaches back; at most it holds twice as many."""


class OwnTexts:
    """An index of prompt and output of each request that is drafted for."""

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def find(self, requests: Sequence[Request]) -> list[Match | None]:
        """For each request the earlier occurrence of its last tokens; None: there is none."""
        indices = [self._index(request) for request in requests]
        shares = fair_shares((index.num_unread for index in indices), MAX_INDEXED_PER_CALL)
        for index, share in zip(indices, shares, strict=True):
            index.extend(share)
        return [index.find() for index in indices]

    def forget(self, request_id: str) -> None:
        """The request has ended; unknown ones are ignored."""
        self._indices.pop(request_id, None)

    @property
    def num_tokens(self) -> int:
        """Of all requests; a token takes some 150 bytes."""
        return sum(map(len, self._indices.values()))

    def _index(self, request: Request) -> NgramIndex:
        index = self._indices.get(request.request_id)
        num_tokens = len(request.token_ids)
        if index is None or num_tokens - index.start > 2 * WINDOW:
            index = NgramIndex(request.token_ids, start=max(0, num_tokens - WINDOW))
            self._indices[request.request_id] = index
        return index


def continuation(token_ids: Sequence[int], match: Match, num_tokens: int) -> tuple[int, ...]:
    """The tokens that follow the match; past the end of the text the copy continues with its own
    tokens."""
    source = token_ids[match.position : match.position + num_tokens]
    repeated = [*source] * -(-num_tokens // len(source))
    return tuple(repeated[:num_tokens])
