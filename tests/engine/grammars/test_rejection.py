"""Rejection sampling under a grammar keeps the output's distribution exact.

A Markov chain over six tokens with rules given by a Python function: the probability of each
continuation is known, and compared with its frequency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from loraplex.engine.draft import NO_DRAFT, Draft
from loraplex.engine.execution.grammar_masks import restrict
from loraplex.engine.grammars.matcher import Matcher
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.acceptors import Acceptor, CoupledAcceptor, RejectionAcceptor
from loraplex.engine.speculation.drawing import (
    CoupledDrawing,
    DraftDrawing,
    GrowingChain,
    IndependentDrawing,
    draw_next,
)
from support.chi_square import p_value
from support.grammars import ScriptedAutomaton, SequentialExecutor

VOCAB_SIZE, LENGTH, NUM_DRAWS = 6, 3, 4000
END = 5
ALPHA = 1e-5
LOGITS = 1.2 * torch.randn(2, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
TARGET, PROPOSED = LOGITS[0], LOGITS.sum(0)
"""Row t: what comes behind token t."""


def allowed(taken: Sequence[int]) -> list[int]:
    """No token twice in a row, nor its successor; it never ends."""
    last = taken[-1] if taken else 0
    return [token for token in range(END) if token not in (last, last + 1)]


def make_request(seed: int) -> Request:
    submitted = GenerationRequest("r", "acme", [0], SamplingParams(max_tokens=64))
    request = Request(submitted, CacheNamespace("acme", "runtime", None), seed, 0.0, None)
    automaton = ScriptedAutomaton(allowed)
    request.matcher = Matcher(automaton, end_token_ids=frozenset({END}), ignores_end=False)
    return request


def drawing_chains(drawing: DraftDrawing) -> Callable[[Sequence[Request]], list[Draft]]:
    def propose(requests: Sequence[Request]) -> list[Draft]:
        chains = [GrowingChain(request, LENGTH) for request in requests]
        for _ in range(LENGTH):
            last = [(chain.token_ids or chain.request.token_ids)[-1] for chain in chains]
            draw_next(chains, PROPOSED[last], drawing)
        return [chain.draft() for chain in chains]

    return propose


def always_the_same(requests: Sequence[Request]) -> list[Draft]:
    """What the grammar forbids as often as not."""
    return [Draft((2, 4, 1)) for _ in requests]


def expected() -> Tensor:
    """Of each continuation, whose number has its tokens as digits."""
    chances = torch.zeros(VOCAB_SIZE**LENGTH, dtype=torch.float64)
    for tokens in product(range(VOCAB_SIZE), repeat=LENGTH):
        chance, place = 1.0, 0
        for index, token in enumerate(tokens):
            may = allowed(tokens[:index])
            logits = TARGET[tokens[index - 1] if index else 0, may].double()
            chance *= float(logits.softmax(-1)[may.index(token)]) if token in may else 0.0
            place = VOCAB_SIZE * place + token
        chances[place] = chance
    return chances


@pytest.mark.parametrize(
    ("acceptor", "propose"),
    [
        (RejectionAcceptor(), drawing_chains(IndependentDrawing())),
        (RejectionAcceptor(), always_the_same),
        (CoupledAcceptor(), drawing_chains(CoupledDrawing())),
        (CoupledAcceptor(), always_the_same),
    ],
    ids=["rejection-drawn", "rejection-fixed", "coupled-drawn", "coupled-fixed"],
)
def test_the_distribution_is_the_models_under_the_condition_of_the_grammar(
    acceptor: Acceptor, propose: Callable[[Sequence[Request]], list[Draft]]
) -> None:
    seeds = torch.randint(2**62, (NUM_DRAWS,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = [make_request(seed) for seed in seeds]
    num_accepted = 0
    while growing := [it for it in requests if it.num_generated_tokens < LENGTH]:
        for request, draft in zip(growing, propose(growing), strict=True):
            assert request.matcher is not None
            request.draft = request.matcher.cut(draft)
        tokens = [t for r in growing for t in (r.token_ids[-1], *r.draft.token_ids)]
        logits, failed = restrict(growing, TARGET[tokens], SequentialExecutor(), TARGET.shape[1])
        assert not failed
        for request, (path, token_ids) in zip(
            growing, acceptor.accept(growing, logits), strict=True
        ):
            assert request.matcher is not None
            request.matcher.accept(token_ids)
            request.token_ids += token_ids
            request.draft = NO_DRAFT
            num_accepted += len(path)
    assert num_accepted > NUM_DRAWS / 10
    places = [
        VOCAB_SIZE * (VOCAB_SIZE * first + second) + third
        for first, second, third in (request.token_ids[1 : 1 + LENGTH] for request in requests)
    ]
    assert p_value(torch.tensor(places), expected()) > ALPHA


def test_what_was_drawn_under_the_grammar_is_never_cut() -> None:
    requests = [make_request(seed) for seed in range(200)]
    for request, draft in zip(
        requests, drawing_chains(IndependentDrawing())(requests), strict=True
    ):
        assert request.matcher is not None
        assert len(request.matcher.cut(draft)) == LENGTH
        assert draft.probabilities is not None
        assert not draft.probabilities[:, END].any()


def test_a_tree_keeps_the_branches_that_the_grammar_allows() -> None:
    request = make_request(0)
    assert request.matcher is not None
    tree = Draft((2, 1, 4, 3, 0, 3, 0), (-1, -1, 0, 0, 2, 1, 5))
    kept = request.matcher.cut(tree)
    # Behind the token 0 neither 0 nor 1 may come, behind 2 neither 2 nor 3.
    assert kept.token_ids == (2, 4, 0)
    assert [kept.parent(index) for index in range(3)] == [-1, 0, 1]
    assert request.matcher.cut(Draft((2, 4, 0, 1))).token_ids == (2, 4, 0)
