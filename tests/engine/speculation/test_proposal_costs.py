"""The learned costs of a proposer whose true costs are known."""

from __future__ import annotations

import random

import pytest

from loraplex.engine.speculation.proposal_costs import ProposalCosts
from support.modelled_device import Drafter

TRUE = Drafter({}, call=1e-3, request=0.2e-3, token=0.1e-3, place=4e-3)


def learned(*calls: list[int], noise: float = 0.0, drafter: Drafter = TRUE) -> ProposalCosts:
    costs, rng = ProposalCosts(), random.Random(3)
    costs.observe([1], 30.0)  # allocates and compiles
    for lengths in calls:
        costs.observe(lengths, drafter.seconds(lengths) * rng.uniform(1 - noise, 1 + noise))
    return costs


def company(num_calls: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randint(0, 8) for _ in range(rng.randint(1, 16))] for _ in range(num_calls)]


def test_learns_what_is_paid_per_call_request_token_and_place() -> None:
    costs = learned(*company(300), noise=0.05)
    assert costs.position_seconds == pytest.approx(TRUE.place, rel=0.1)
    assert costs.token_seconds == pytest.approx(TRUE.token, rel=0.3)
    assert costs.request_seconds == pytest.approx(TRUE.request, rel=0.4)
    assert costs.predict([4]) == pytest.approx(TRUE.seconds([4]), rel=0.05)


def test_knows_from_calls_for_many_what_one_alone_costs() -> None:
    costs = learned([1] * 8, [2] * 8, [4] * 8, [3] * 5, [8] * 16)
    for length in (1, 4, 8):
        assert costs.predict([length]) == pytest.approx(TRUE.seconds([length]), rel=0.15)


def test_takes_what_single_requests_cost_for_what_many_would_share() -> None:
    costs = learned(*[[length] for length in (1, 2, 4, 8) * 4])
    assert costs.request_seconds == costs.token_seconds == 0.0
    assert costs.position_seconds == pytest.approx(TRUE.place + TRUE.token, rel=0.01)
    assert costs.call_seconds == pytest.approx(TRUE.call + TRUE.request, rel=0.01)


def test_who_pays_by_the_token_has_places_for_nothing() -> None:
    drafter = Drafter({}, call=1e-3, token=0.5e-3)
    costs = learned(*company(200), noise=0.02, drafter=drafter)
    assert costs.token_seconds == pytest.approx(drafter.token, rel=0.05)
    assert costs.position_seconds < 0.2 * drafter.token


def test_costs_are_never_negative() -> None:
    costs, rng = ProposalCosts(), random.Random(7)
    for lengths in company(300):
        costs.observe(lengths, rng.uniform(1e-4, 1.0))
        parts = (
            costs.call_seconds,
            costs.request_seconds,
            costs.token_seconds,
            costs.position_seconds,
        )
        assert min(parts) >= 0.0


def test_nothing_observed_costs_nothing_and_the_first_call_is_passed_over() -> None:
    assert ProposalCosts().predict([8]) == 0.0
    assert learned().predict([8]) == 0.0
    assert learned().total_seconds == 30.0
