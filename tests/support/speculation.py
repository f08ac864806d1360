"""A proposer that knows the output and is wrong as often as a test wants; comparison of outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import isclose

from torch import Tensor

from loraplex.engine import config
from loraplex.engine.draft import ROOT, Draft
from loraplex.engine.request import Request
from loraplex.engine.speculation.proposer import DraftRequest, Proposer
from loraplex.engine.speculation.proposers import OPENERS
from support.engine import Answer


def ticking_clock() -> Callable[[], float]:
    """A clock that advances by a millisecond a reading.

    Draft lengths follow from step times: with this one every step takes as long, on any machine.
    """
    return count(step=0.001).__next__


class ScriptedProposer:
    """Drafts from given answers, by request id; each token is wrong with a given probability."""

    name = "scripted"
    needs_hidden_states = False

    def __init__(
        self,
        answers: Mapping[str, Sequence[int]],
        *,
        error: float = 0.0,
        vocab_size: int = 256,
        seed: int = 0,
    ) -> None:
        self.answers = dict(answers)
        self.forgotten: list[str] = []
        self.error = error
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(request, num_tokens) for request, num_tokens in wanted]

    def _propose(self, request: Request, num_tokens: int) -> Draft:
        start = request.num_generated_tokens
        answer = self.answers.get(request.request_id, ())[start : start + num_tokens]
        return Draft(tuple(map(self._spoil, answer)))

    def _spoil(self, token: int) -> int:
        is_wrong = self._rng.random() < self.error
        return self._rng.randrange(self._vocab_size) if is_wrong else token

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class ScriptedTreeProposer(ScriptedProposer):
    """The same draft tokens, each with some chance, among random branches."""

    name = "scripted_tree"

    def _propose(self, request: Request, num_tokens: int) -> Draft:
        draft_tokens = iter(super()._propose(request, num_tokens).token_ids)
        token_ids: list[int] = []
        parents: list[int] = []
        tip = ROOT
        while len(token_ids) < num_tokens:
            draft_token = next(draft_tokens, None) if self._rng.random() < 0.5 else None
            if draft_token is None:
                token_ids.append(self._rng.randrange(self._vocab_size))
                parents.append(self._rng.randrange(ROOT, len(parents)))
            else:
                token_ids.append(draft_token)
                parents.append(tip)
                tip = len(parents) - 1
        return Draft(tuple(token_ids), tuple(parents))


@contextmanager
def scripted(proposer: Proposer) -> Iterator[str]:
    """Let engines opened inside know the proposer; yields what their configuration says."""
    OPENERS[proposer.name] = lambda *_: proposer
    known = config.TREE_PROPOSERS
    if isinstance(proposer, ScriptedTreeProposer):
        config.TREE_PROPOSERS = (*known, proposer.name)
    try:
        yield proposer.name
    finally:
        del OPENERS[proposer.name]
        config.TREE_PROPOSERS = known


def assert_same_answer(actual: Answer, expected: Answer) -> None:
    """The same tokens and end; log-probabilities but for rounding."""
    assert actual.token_ids == expected.token_ids
    assert actual.end.reason == expected.end.reason
    assert actual.end.stop_token_id == expected.end.stop_token_id
    assert actual.end.num_generated_tokens == len(expected.token_ids)
    for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
        assert one.chosen.token_id == other.chosen.token_id
        pairs = zip((one.chosen, *one.top), (other.chosen, *other.top), strict=True)
        assert all(
            isclose(left.logprob, right.logprob, rel_tol=0, abs_tol=1e-5) for left, right in pairs
        )
