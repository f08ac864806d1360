"""The masks of a step whose requests have different grammars, or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import permutations

import pytest
import torch

from loraplex.engine.draft import Draft
from loraplex.engine.execution.grammar_masks import restrict, restrict_drafts
from loraplex.engine.grammars.matcher import Matcher
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from support.grammars import ScriptedAutomaton, SequentialExecutor

VOCAB_SIZE = 40
"""No multiple of the 32 tokens of a word."""
ENDS = frozenset({33, 39})
END = min(ENDS)
ANY = set(range(VOCAB_SIZE))

Allowed = Callable[[Sequence[int]], Collection[int]]


def make_request(
    allowed: Allowed | None,
    *,
    draft: Draft | None = None,
    ignores_end: bool = False,
    breaks_behind: int | None = None,
) -> Request:
    submitted = GenerationRequest("r", "acme", [0], SamplingParams(max_tokens=64))
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 0, 0.0, None)
    request.draft = draft or request.draft
    if allowed is not None:
        automaton = ScriptedAutomaton(allowed, breaks_behind=breaks_behind)
        request.matcher = Matcher(automaton, end_token_ids=ENDS, ignores_end=ignores_end)
    return request


def allowed_by_row(*requests: Request) -> list[set[int]]:
    num_rows = sum(1 + len(request.draft) for request in requests)
    logits = torch.zeros(num_rows, VOCAB_SIZE)
    masked = restrict(requests, logits, SequentialExecutor(), VOCAB_SIZE).logits
    assert not logits.any(), "the logits are left as they were"
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in masked]


def test_who_ignores_the_end_takes_it_from_nobody_else() -> None:
    cases = [
        (make_request(lambda _: {1, END}), {1} | ENDS),
        (make_request(lambda _: {1, END}, ignores_end=True), {1}),
        (make_request(lambda _: {END}, ignores_end=True), set(ENDS)),
        (make_request(lambda _: {2}), {2}),
        (make_request(None), ANY),
    ]
    for order in permutations(cases):
        assert allowed_by_row(*(request for request, _ in order)) == [tokens for _, tokens in order]


@pytest.mark.parametrize("token", [0, 31, 32, 38])
def test_a_single_token_that_is_allowed_is_enough_for_a_single_request(token: int) -> None:
    request = make_request(lambda _: {token})
    masked, failed = restrict(
        [request], torch.zeros(1, VOCAB_SIZE), SequentialExecutor(), VOCAB_SIZE
    )
    assert masked[0].isfinite().nonzero().flatten().tolist() == [token]
    assert failed == {}


def test_each_row_of_a_draft_is_masked_by_what_stands_before_it() -> None:
    def next_after(taken: Sequence[int]) -> set[int]:
        return {len(taken) + 10}

    tree = Draft((10, 11, 5, 12), (-1, 0, -1, 1))
    with_tree = make_request(next_after, draft=tree)
    rows = allowed_by_row(
        make_request(None, draft=Draft((3,))), with_tree, make_request(next_after)
    )
    # A row behind a forbidden token is never looked at.
    assert [*rows[:5], *rows[6:]] == [ANY, ANY, {10}, {11}, {12}, {13}, {10}]


def test_a_grammar_that_fails_or_allows_nothing_fails_its_request_alone() -> None:
    stuck = make_request(lambda _: ())
    broken = make_request(lambda _: {1}, breaks_behind=0)
    sound = make_request(lambda _: {1})
    requests = [sound, stuck, make_request(None), broken]
    failed = restrict(requests, torch.zeros(4, VOCAB_SIZE), SequentialExecutor(), VOCAB_SIZE).failed
    assert failed.keys() == {stuck, broken}


def test_a_proposer_s_logits_are_masked_as_far_as_its_tokens_are_allowed() -> None:
    def up_to_two(taken: Sequence[int]) -> set[int]:
        return {7} if len(taken) < 2 else {END} if len(taken) == 2 else set()

    drafted = [[], [7], [7, 7], [7, 7, END], [3], [7, 3], []]
    requests = [make_request(up_to_two) for _ in drafted]
    requests[-1] = make_request(None)
    masked = restrict_drafts(requests, drafted, torch.zeros(len(drafted), VOCAB_SIZE))
    rows = [set(row.isfinite().nonzero().flatten().tolist()) for row in masked]
    assert rows[:3] == [{7}, {7}, set(ENDS)]
    assert rows[4:] == [ANY, ANY, ANY], "behind a forbidden token nothing is masked"
    for request in requests[:-1]:
        assert request.matcher is not None
        assert isinstance(request.matcher.automaton, ScriptedAutomaton)
        assert request.matcher.automaton.taken == [], "the grammar is where it was"


class StrictAutomaton(ScriptedAutomaton):
    """Fails if it is asked for more once it has stopped, as the library may."""

    def validate_tokens(self, tokens: list[int]) -> int:
        assert not self.is_stopped()
        return super().validate_tokens(tokens)


def test_behind_the_end_nothing_is_drafted_and_the_automaton_is_left_alone() -> None:
    automaton = StrictAutomaton(lambda taken: () if taken else {END})
    matcher = Matcher(automaton, end_token_ids=ENDS, ignores_end=False)
    matcher.accept([END])
    assert len(matcher.cut(Draft((END, 1)))) == 0
    assert len(matcher.cut(Draft((END, 1), (-1, -1)))) == 0
