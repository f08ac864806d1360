"""Proposes what most often followed the last tokens, in recent outputs and in the request itself.

It helps for tasks that recur: the calls of an agent, forms, code of one style (Oliaro et al.,
"SuffixDecoding", 2024). The longest match of the text's end is searched in the outputs that are
remembered of the request's adapter version, and in its own prompt and output. The continuations of
all equally long matches vote, token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from ...adapters.identity import AdapterKey
from ..draft import Draft
from ..request import Request
from .ngram_index import Match
from .own_texts import DRAFTS_PER_TOKEN, OwnTexts, continuation
from .proposer import DraftRequest
from .remembered_outputs import RememberedOutputs


class SuffixProposer:
    name = "suffix"
    needs_hidden_states = False

    def __init__(self) -> None:
        self._texts = OwnTexts()
        self._outputs = RememberedOutputs()

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        own = self._texts.find([request for request, _ in wanted])
        return [
            self._propose(request, match, num_tokens)
            for (request, num_tokens), match in zip(wanted, own, strict=True)
        ]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """Tokens are indexed when a draft is requested, and outputs when they are complete."""

    def forget(self, request_id: str) -> None:
        self._texts.forget(request_id)

    def remember(self, request: Request, now: float) -> None:
        assert request.adapter is not None, "outputs of the base are not remembered"
        self._outputs.add(
            request.adapter,
            request.token_ids,
            request.num_prompt_tokens,
            arrived_at=request.arrival_time,
            now=now,
        )

    def forget_outputs(self, adapter: AdapterKey, now: float) -> None:
        self._outputs.forget(adapter, now)

    def drop_old_outputs(self, now: float) -> None:
        self._outputs.drop_old(now)

    @property
    def num_remembered_tokens(self) -> int:
        """Of the outputs of all adapter versions."""
        return self._outputs.num_tokens

    def _propose(self, request: Request, own: Match | None, num_tokens: int) -> Draft:
        parts = self._outputs.of(request.adapter) if request.adapter else ()
        found = [(part, part.find(request.token_ids)) for part in parts]
        lengths = [occurrences.length for _, occurrences in found]
        longest = max([own.length if own else 0, *lengths])
        num_tokens = min(num_tokens, DRAFTS_PER_TOKEN * longest)
        followed: list[Sequence[int]] = []
        if own and own.length == longest:
            followed.append(continuation(request.token_ids, own, num_tokens))
        for part, (length, positions) in found:
            if length == longest:
                followed += [part.continuation(each, num_tokens) for each in positions]
        return Draft(tuple(_most_frequent(followed, num_tokens)))


def _most_frequent(followed: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Token by token what most of those say that have said the same so far; of equally many the
    first."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        here = len(tokens)
        followed = [each for each in followed if len(each) > here]
        if not followed:
            break
        ((token, _),) = Counter(each[here] for each in followed).most_common(1)
        followed = [each for each in followed if each[here] == token]
        tokens.append(token)
    return tokens
