"""Prompt lookup: proposes the tokens that followed the last tokens at their earlier occurrence.

It helps for text that quotes, edits or repeats itself (Saxena, "Prompt lookup decoding", 2023; Yang
et al., "Inference with reference", 2023). It needs no model and takes microseconds per draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..draft import NO_DRAFT, Draft
from ..request import Request
from .own_texts import DRAFTS_PER_TOKEN, OwnTexts, continuation
from .proposer import DraftRequest


class NgramProposer:
    name = "ngram"
    needs_hidden_states = False

    def __init__(self) -> None:
        self._texts = OwnTexts()

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        matches = self._texts.find([request for request, _ in wanted])
        for (request, num_tokens), match in zip(wanted, matches, strict=True):
            if match is None:
                drafts.append(NO_DRAFT)
            else:
                length = min(num_tokens, DRAFTS_PER_TOKEN * match.length)
                drafts.append(Draft(continuation(request.token_ids, match, length)))
        return drafts

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """Tokens are indexed when a draft is requested, so requests without drafts cost nothing."""

    def forget(self, request_id: str) -> None:
        self._texts.forget(request_id)

    @property
    def num_indexed_tokens(self) -> int:
        """Of all requests."""
        return self._texts.num_tokens
