"""The draft tokens of a step, compared with an exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from loraplex.engine.speculation.filling import Effort, Filling, Offer, fill

DrawnTokens = Sequence[Sequence[int]]


def effort(
    offers: Sequence[Offer], plain: Effort, calls: dict[str, float], it: DrawnTokens
) -> Effort:
    """What a step with these draft tokens yields and takes, written down from the definition."""
    num_tokens, seconds = plain
    for offer, draft_tokens in zip(offers, it, strict=True):
        for count in draft_tokens:
            num_tokens += sum(offer.gains[:count])
            seconds += count * offer.token_seconds + (offer.request_seconds if count else 0.0)
    used = {
        offer.proposer for offer, draft_tokens in zip(offers, it, strict=True) if any(draft_tokens)
    }
    return Effort(num_tokens, seconds + sum(calls[name] for name in used))


def choices(offers: Sequence[Offer], num_free_tokens: int) -> Iterator[DrawnTokens]:
    per_offer = [
        list(product(range(len(offer.gains) + 1), repeat=offer.num_requests)) for offer in offers
    ]
    for choice in product(*per_offer):
        if sum(map(sum, choice)) <= num_free_tokens:
            yield choice


def best_rate(
    offers: Sequence[Offer], plain: Effort, calls: dict[str, float], num_free_tokens: int
) -> float:
    return max(effort(offers, plain, calls, it).rate for it in choices(offers, num_free_tokens))


def chain_gains(rng: random.Random) -> list[float]:
    gains, value = [], 1.0
    for _ in range(3):
        value *= rng.uniform(0.1, 1.0)
        gains.append(value)
    return gains


def tree_gains(rng: random.Random) -> list[float]:
    return [rng.random() for _ in range(3)]


def filled(
    offers: Sequence[Offer], plain: Effort, calls: dict[str, float], num_free_tokens: int = 10**6
) -> Filling:
    filling = fill(offers, plain=plain, num_free_tokens=num_free_tokens, call_seconds=calls)
    assert sum(map(sum, filling.num_draft_tokens)) <= num_free_tokens
    expected = effort(offers, plain, calls, filling.num_draft_tokens)
    assert filling.step == pytest.approx(expected)
    return filling


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_better_whatever_asking_costs(seed: int) -> None:
    rng = random.Random(seed)
    draw_gains = rng.choice((chain_gains, tree_gains))
    offers = [
        Offer("p", rng.randint(1, 2), draw_gains(rng), rng.uniform(0.01, 1), rng.uniform(0, 0.5))
        for _ in range(rng.randint(1, 3))
    ]
    plain = Effort(sum(offer.num_requests for offer in offers), rng.uniform(0.5, 4))
    calls = {"p": rng.choice((0.0, rng.random()))}
    best = best_rate(offers, plain, calls, 10**6)
    assert filled(offers, plain, calls).step.rate == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_better_where_room_is_short(seed: int) -> None:
    rng = random.Random(seed)
    token_seconds = rng.uniform(0.001, 0.5)
    offers = [
        Offer("p", rng.randint(1, 2), chain_gains(rng), token_seconds)
        for _ in range(rng.randint(1, 3))
    ]
    plain = Effort(sum(offer.num_requests for offer in offers), rng.uniform(0.5, 4))
    num_free = rng.randint(0, 6)
    best = best_rate(offers, plain, {"p": 0.0}, num_free)
    filling = filled(offers, plain, {"p": 0.0}, num_free)
    assert filling.step.rate == pytest.approx(best, rel=1e-9)


def test_with_several_proposers_it_is_nearly_the_best_and_never_worse_than_plain() -> None:
    rng = random.Random(5)
    shares = []
    for _ in range(100):
        offers = [
            Offer(name, 1, chain_gains(rng), rng.uniform(0.01, 0.5), rng.uniform(0, 0.1))
            for name in "pqr"
        ]
        calls = {name: rng.uniform(0, 0.5) for name in "pqr"}
        plain = Effort(3, rng.uniform(0.5, 4))
        rate = filled(offers, plain, calls).step.rate
        assert rate >= plain.rate
        shares.append(rate / best_rate(offers, plain, calls, 10**6))
    assert sum(shares) / len(shares) > 0.995


def test_free_drafts_are_all_taken_and_hopeless_ones_none() -> None:
    offers = [Offer("p", 2, [0.5, 0.1], 0.0), Offer("p", 1, [0.0, 0.0], 0.0)]
    filling = filled(offers, Effort(3, 1.0), {"p": 0.0})
    assert filling.num_draft_tokens == [[2, 2], [0]]


def test_where_room_is_short_drafts_that_belong_together_do_not_block_the_others() -> None:
    """Asking is dear, so each offer's draft tokens pay together only."""
    offers = [
        Offer("p", 3, [0.9, 0.9, 0.9], 0.1, request_seconds=0.3),
        Offer("p", 1, [0.8], 0.1, request_seconds=0.3),
    ]
    filling = filled(offers, Effort(4, 4.0), {"p": 0.0}, num_free_tokens=4)
    assert filling.num_draft_tokens == [[3, 0, 0], [1]]
