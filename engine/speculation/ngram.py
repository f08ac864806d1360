"""Prompt lookup: what followed the last tokens when they last came."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..request import Request
from .draft import NO_DRAFT, Draft
from .proposer import Wanted

LONGEST = 3
"""Tokens of the longest suffix that is looked up."""


class NgramProposer:
    name = "ngram"
    needs_hidden_states = False

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [_lookup(request.token_ids, num_tokens) for request, num_tokens in wanted]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """It looks at nothing but the tokens."""

    def forget(self, request_id: str) -> None:
        """It keeps nothing."""


def _lookup(token_ids: Sequence[int], num_tokens: int) -> Draft:
    for length in range(min(LONGEST, len(token_ids) - 1), 0, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix:
                end = start + length
                return Draft(tuple(token_ids[end : end + num_tokens]))
    return NO_DRAFT
