"""The draft tokens of a step, compared with trying out every choice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

import pytest

from loraplex.engine.speculation.draft_plan import DraftOption, DraftPlan, StepEstimate, plan_drafts

DrawnTokens = Sequence[Sequence[int]]


def estimate(
    options: Sequence[DraftOption], plain: StepEstimate, calls: dict[str, float], it: DrawnTokens
) -> StepEstimate:
    """What a step with these draft tokens yields and takes, written down from the definition."""
    num_tokens, seconds = plain
    for option, draft_tokens in zip(options, it, strict=True):
        for count in draft_tokens:
            num_tokens += sum(option.gains[:count])
            seconds += count * option.token_seconds + (option.request_seconds if count else 0.0)
    used = {
        option.proposer
        for option, draft_tokens in zip(options, it, strict=True)
        if any(draft_tokens)
    }
    return StepEstimate(num_tokens, seconds + sum(calls[name] for name in used))


def choices(options: Sequence[DraftOption], num_free_tokens: int) -> Iterator[DrawnTokens]:
    per_option = [
        list(product(range(len(option.gains) + 1), repeat=option.num_requests))
        for option in options
    ]
    for choice in product(*per_option):
        if sum(map(sum, choice)) <= num_free_tokens:
            yield choice


def best_rate(
    options: Sequence[DraftOption],
    plain: StepEstimate,
    calls: dict[str, float],
    num_free_tokens: int,
) -> float:
    return max(estimate(options, plain, calls, it).rate for it in choices(options, num_free_tokens))


def chain_gains(rng: random.Random) -> list[float]:
    gains, value = [], 1.0
    for _ in range(3):
        value *= rng.uniform(0.1, 1.0)
        gains.append(value)
    return gains


def tree_gains(rng: random.Random) -> list[float]:
    return [rng.random() for _ in range(3)]


def planned(
    options: Sequence[DraftOption],
    plain: StepEstimate,
    calls: dict[str, float],
    num_free_tokens: int = 10**6,
) -> DraftPlan:
    draft_plan = plan_drafts(
        options, plain=plain, num_free_tokens=num_free_tokens, call_seconds=calls
    )
    assert sum(map(sum, draft_plan.num_draft_tokens)) <= num_free_tokens
    expected = estimate(options, plain, calls, draft_plan.num_draft_tokens)
    assert draft_plan.step == pytest.approx(expected)
    return draft_plan


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_better_whatever_asking_costs(seed: int) -> None:
    rng = random.Random(seed)
    draw_gains = rng.choice((chain_gains, tree_gains))
    options = [
        DraftOption(
            "p", rng.randint(1, 2), draw_gains(rng), rng.uniform(0.01, 1), rng.uniform(0, 0.5)
        )
        for _ in range(rng.randint(1, 3))
    ]
    plain = StepEstimate(sum(option.num_requests for option in options), rng.uniform(0.5, 4))
    calls = {"p": rng.choice((0.0, rng.random()))}
    best = best_rate(options, plain, calls, 10**6)
    assert planned(options, plain, calls).step.rate == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_better_where_room_is_short(seed: int) -> None:
    rng = random.Random(seed)
    token_seconds = rng.uniform(0.001, 0.5)
    options = [
        DraftOption("p", rng.randint(1, 2), chain_gains(rng), token_seconds)
        for _ in range(rng.randint(1, 3))
    ]
    plain = StepEstimate(sum(option.num_requests for option in options), rng.uniform(0.5, 4))
    num_free = rng.randint(0, 6)
    best = best_rate(options, plain, {"p": 0.0}, num_free)
    draft_plan = planned(options, plain, {"p": 0.0}, num_free)
    assert draft_plan.step.rate == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_rate_of_an_option_is_that_of_its_best_number_for_all_its_requests(
    seed: int,
) -> None:
    rng = random.Random(seed)
    option = DraftOption(
        "p", rng.randint(1, 4), tree_gains(rng), rng.uniform(0.01, 0.5), rng.uniform(0, 0.1)
    )
    plain, calls = StepEstimate(4, rng.uniform(0.5, 4)), {"p": rng.uniform(0, 0.5)}
    numbers = range(len(option.gains) + 1)
    rates = [estimate([option], plain, calls, [[n] * option.num_requests]).rate for n in numbers]
    assert option.best_rate(plain, calls["p"]) == pytest.approx(max(rates))


def test_tokens_that_cost_nothing_come_at_any_rate_and_no_tokens_at_none() -> None:
    rates = [StepEstimate(tokens, seconds).rate for tokens, seconds in ((6, 2), (1, 0), (0, 0))]
    assert rates == [3.0, inf, 0.0]


def test_with_several_proposers_it_is_nearly_the_best_and_never_worse_than_plain() -> None:
    rng = random.Random(5)
    shares = []
    for _ in range(100):
        options = [
            DraftOption(name, 1, chain_gains(rng), rng.uniform(0.01, 0.5), rng.uniform(0, 0.1))
            for name in "pqr"
        ]
        calls = {name: rng.uniform(0, 0.5) for name in "pqr"}
        plain = StepEstimate(3, rng.uniform(0.5, 4))
        rate = planned(options, plain, calls).step.rate
        assert rate >= plain.rate
        shares.append(rate / best_rate(options, plain, calls, 10**6))
    assert sum(shares) / len(shares) > 0.995


def test_free_drafts_are_all_taken_and_hopeless_ones_none() -> None:
    options = [DraftOption("p", 2, [0.5, 0.1], 0.0), DraftOption("p", 1, [0.0, 0.0], 0.0)]
    draft_plan = planned(options, StepEstimate(3, 1.0), {"p": 0.0})
    assert draft_plan.num_draft_tokens == [[2, 2], [0]]


def test_where_room_is_short_drafts_that_belong_together_do_not_block_the_others() -> None:
    """Asking is dear, so each option's draft tokens pay together only."""
    options = [
        DraftOption("p", 3, [0.9, 0.9, 0.9], 0.1, request_seconds=0.3),
        DraftOption("p", 1, [0.8], 0.1, request_seconds=0.3),
    ]
    draft_plan = planned(options, StepEstimate(4, 4.0), {"p": 0.0}, num_free_tokens=4)
    assert draft_plan.num_draft_tokens == [[3, 0, 0], [1]]
