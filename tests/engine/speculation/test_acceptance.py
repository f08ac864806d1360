"""The estimated acceptance of drafts, compared with the actual one."""

from __future__ import annotations

import random

import pytest

from loraplex.engine.speculation.acceptance import AcceptanceRates
from loraplex.engine.speculation.hit_rate import HitRate
from loraplex.engine.speculation.track import Track


def observe_chains(
    acceptance: AcceptanceRates, right: float, num_drafts: int, *, seed: int = 3, length: int = 4
) -> None:
    rng = random.Random(seed)
    for _ in range(num_drafts):
        num_right = next((n for n in range(length) if rng.random() >= right), length)
        acceptance.forget()
        acceptance.observe(length, range(num_right))


@pytest.mark.parametrize("right", [0.0, 0.3, 0.9, 1.0])
def test_a_chains_places_fall_off_as_its_tokens_are_right(right: float) -> None:
    acceptance = AcceptanceRates(4)
    estimates = []
    for seed in range(40):
        observe_chains(acceptance, right, 50, seed=seed)
        estimates.append(list(acceptance.probabilities))
    means = [sum(column) / len(column) for column in zip(*estimates, strict=True)]
    assert means == pytest.approx([right**place for place in range(1, 5)], abs=0.07)


def test_a_trees_places_stand_for_themselves() -> None:
    """Of two children of the root one is always right, with its only child."""
    acceptance = AcceptanceRates(3)
    for index in range(200):
        acceptance.forget()
        acceptance.observe(3, [0, 2] if index % 4 else [1])
    assert acceptance.probabilities == pytest.approx([0.75, 0.25, 0.75], abs=0.1)


def test_what_was_not_tried_is_expected_to_go_on_falling() -> None:
    acceptance = AcceptanceRates(8)
    for _ in range(300):
        acceptance.forget()
        acceptance.observe(2, [0, 1])
    assert acceptance.probabilities[7] > 0.9
    for _ in range(300):
        acceptance.forget()
        acceptance.observe(2, [])
    assert max(acceptance.probabilities) < 0.01


def test_what_is_new_is_like_the_others_until_it_shows() -> None:
    others = AcceptanceRates(4)
    observe_chains(others, 0.9, 200)
    new = AcceptanceRates(4, others)
    assert new.probabilities == pytest.approx(others.probabilities, rel=0.05)
    observe_chains(new, 0.0, 60)
    assert new.probabilities[0] < 0.1


def test_probabilities_stay_between_0_and_1_for_ever() -> None:
    acceptance = AcceptanceRates(3)
    for _ in range(5_000):
        acceptance.forget(0.5)
    assert all(0.0 <= value <= 1.0 for value in acceptance.probabilities)
    for accepted in ([0, 1, 2], []):
        for _ in range(2_000):
            acceptance.forget(0.5)
            acceptance.observe(3, accepted)
            assert all(0.0 <= value <= 1.0 for value in acceptance.probabilities)


def test_the_hit_rate_is_the_recent_share_of_requests_that_got_a_draft() -> None:
    hit_rate = HitRate()
    assert hit_rate.value == 1.0
    for index in range(400):
        hit_rate.forget()
        hit_rate.observe(has_draft=index % 5 == 0)
    assert hit_rate.value == pytest.approx(0.2, abs=0.05)
    assert HitRate(hit_rate).value == pytest.approx(hit_rate.value)


def test_the_drafts_of_one_step_count_alike_whatever_their_order() -> None:
    def seen(*outcomes: bool) -> Track:
        track = Track(2)
        for is_right in outcomes:
            track.observe_request(1, has_draft=is_right)
            track.observe(1, 2, [0, 1] if is_right else [])
        return track

    one, other = seen(True, True, False, False), seen(False, False, True, True)
    assert one.hit_rate.value == pytest.approx(other.hit_rate.value)
    assert one.acceptance.probabilities == pytest.approx(other.acceptance.probabilities)
