"""The rule that ends a canary: seldom by chance, and soon when it is worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from loraplex.platform.adapters.canary_limits import CanaryLimits
from loraplex.platform.adapters.canary_rule import FALSE_ALARMS, bound, compare
from loraplex.platform.adapters.canary_sums import ArmSums, Observation

NUM_RUNS = 300
LOOKS = [100, 120, 150, 180, 220, 270, 330, 400, 480, 580, 700, 850, 1000]
"""At how many requests of the canary the rule looks."""
MAIN_PER_CANARY = 3
"""The canary gets a quarter of the requests."""
NO_LIMITS = CanaryLimits(error_rate=None, refusals=None, length=None, latency=None, judge=None)


class Behavior(NamedTuple):
    """How a version answers."""

    error_rate: float = 0.05
    refusals: float = 0.1
    mean_length: float = 40.0
    token_seconds: float = 0.02


def grow(generator: np.random.Generator, sums: ArmSums, behavior: Behavior, num: int) -> None:
    """Add requests: geometric lengths, times with a long tail."""
    errors = generator.binomial(num, behavior.error_rate)
    num_answers = num - errors
    lengths = np.log(generator.geometric(1 / behavior.mean_length, num_answers))
    times = np.log(behavior.token_seconds) + 0.4 * generator.standard_normal(num_answers)
    sums.num_requests += num
    sums.num_errors += int(errors)
    sums.num_answers += num_answers
    sums.num_refusals += int(generator.binomial(num_answers, behavior.refusals))
    sums.num_lengths += num_answers
    sums.log_length_sum += float(lengths.sum())
    sums.log_length_squares += float((lengths**2).sum())
    sums.num_times += num_answers
    sums.log_time_sum += float(times.sum())
    sums.log_time_squares += float((times**2).sum())


def ends(seed: int, main: Behavior, canary: Behavior, limits: CanaryLimits) -> Iterator[int]:
    """For each run that ends the canary, after how many of its requests."""
    generator = np.random.default_rng(seed)
    for _ in range(NUM_RUNS):
        sums = ArmSums(), ArmSums()
        before = 0
        for look in LOOKS:
            grow(generator, sums[0], main, (look - before) * MAIN_PER_CANARY)
            grow(generator, sums[1], canary, look - before)
            before = look
            if any(each.is_exceeded for each in compare(*sums, limits)):
                yield look
                break


def test_an_equal_canary_ends_in_less_than_one_of_a_hundred_runs() -> None:
    num_ended = len(list(ends(1, Behavior(), Behavior(), CanaryLimits())))
    assert num_ended < FALSE_ALARMS * NUM_RUNS


def test_a_canary_at_its_limits_ends_in_less_than_one_of_a_hundred_runs() -> None:
    # The worst canary that is allowed: what is promised is promised for it too.
    main = Behavior()
    worst = Behavior(
        error_rate=main.error_rate + 0.02,
        refusals=main.refusals + 0.05,
        token_seconds=main.token_seconds * 1.5,
    )
    num_ended = len(list(ends(2, main, worst, CanaryLimits())))
    assert num_ended < FALSE_ALARMS * NUM_RUNS


def test_a_bound_of_two_errors_would_end_many_canaries_by_chance() -> None:
    # Shows that the simulation can tell a rule that only reckons with one look.
    generator = np.random.default_rng(3)
    main, worst = Behavior(), Behavior(error_rate=0.07)
    num_ended = 0
    for _ in range(200):
        sums = ArmSums(), ArmSums()
        grow(generator, sums[0], main, 900)
        for _ in range(20):
            grow(generator, sums[0], main, 900)
            grow(generator, sums[1], worst, 100)
            (compared,) = compare(*sums, replace(NO_LIMITS, error_rate=0.02))
            if compared.certainty > 2:
                num_ended += 1
                break
    assert num_ended > 0.05 * 200


def test_a_canary_with_twice_the_errors_ends_within_a_thousand_of_its_requests() -> None:
    worse = Behavior(error_rate=0.2)
    after = list(ends(4, Behavior(error_rate=0.1), worse, CanaryLimits()))
    assert sum(look <= 1000 for look in after) >= 0.95 * NUM_RUNS


@pytest.mark.parametrize(
    ("limit", "worse"),
    [
        ("error_rate", Behavior(error_rate=0.5)),
        ("refusals", Behavior(refusals=0.6)),
        ("length", Behavior(mean_length=200.0)),
        ("length", Behavior(mean_length=8.0)),
        ("latency", Behavior(token_seconds=0.06)),
    ],
)
def test_what_is_far_worse_ends_at_the_first_look(limit: str, worse: Behavior) -> None:
    generator = np.random.default_rng(5)
    for _ in range(20):
        sums = ArmSums(), ArmSums()
        grow(generator, sums[0], Behavior(), 900)
        grow(generator, sums[1], worse, 150)
        exceeded = [each.limit for each in compare(*sums, CanaryLimits()) if each.is_exceeded]
        assert exceeded == [limit]


@pytest.mark.parametrize(
    "better", [Behavior(error_rate=0.0), Behavior(refusals=0.0), Behavior(token_seconds=0.001)]
)
def test_a_better_canary_exceeds_nothing(better: Behavior) -> None:
    generator = np.random.default_rng(6)
    sums = ArmSums(), ArmSums()
    grow(generator, sums[0], Behavior(), 5000)
    grow(generator, sums[1], better, 5000)
    assert not any(each.is_exceeded for each in compare(*sums, CanaryLimits()))


def test_versions_without_enough_requests_are_not_compared() -> None:
    sums = ArmSums(num_requests=100), ArmSums(num_requests=99, num_errors=99)
    assert compare(*sums, CanaryLimits(min_requests=100)) == []
    assert compare(sums[1], sums[0], CanaryLimits(min_requests=100)) == []
    assert [each.limit for each in compare(*sums, CanaryLimits(min_requests=99))] == ["error_rate"]


def test_no_limit_is_no_comparison() -> None:
    generator = np.random.default_rng(7)
    sums = ArmSums(), ArmSums()
    for each in sums:
        grow(generator, each, Behavior(), 500)
    assert compare(*sums, NO_LIMITS) == []


def test_answers_of_one_length_are_compared_too() -> None:
    sums = ArmSums(), ArmSums()
    for each, num_tokens in zip(sums, (2, 8), strict=True):
        for _ in range(100):
            each.add(Observation(is_refusal=False, num_tokens=num_tokens))
    (compared,) = compare(*sums, replace(NO_LIMITS, length=1.5))
    assert compared.is_exceeded
    assert [compared.main, compared.canary] == pytest.approx([2, 8])
    assert compared.describe() == (
        "length: 8.0 tokens in 100 requests of the canary, 2.0 tokens in 100 of the other "
        "version; limit 1.5"
    )


def test_the_bound_is_the_normal_mixtures() -> None:
    # The mixture's likelihood ratio at the bound, integrated numerically, is the inverse of the
    # probability on both sides: Robbins 1970, with the drift's prior N(0, 1 / 20).
    for num in (50.0, 500.0, 5000.0):
        sums = bound(num) * math.sqrt(num)
        drifts = np.linspace(-3, 3, 2_000_001)
        prior = np.exp(-10 * drifts**2) * math.sqrt(20 / (2 * math.pi))
        ratios = np.exp(drifts * sums - num * drifts**2 / 2) * prior
        ratio = ratios.sum() * (drifts[1] - drifts[0])  # it is zero at both ends
        assert ratio == pytest.approx(1 / (2 * FALSE_ALARMS / 6), rel=1e-4)


# --- judged by comparisons ------------------------------------------------------------------------

SCORES = [0.0, 0.25, 0.5, 0.75, 1.0]
"""Of a comparison in both orders."""
EQUAL = [0.15, 0.15, 0.4, 0.15, 0.15]
AT_THE_LIMIT = [0.24, 0.18, 0.36, 0.18, 0.04]
WORSE = [0.5, 0.2, 0.2, 0.05, 0.05]
JUDGED = replace(NO_LIMITS, judge=0.1, judge_model="judge")


def judged_ends(seed: int, shares: list[float]) -> Iterator[int]:
    """For each run that ends the canary, after how many comparisons."""
    generator = np.random.default_rng(seed)
    for _ in range(NUM_RUNS):
        canary = ArmSums()
        for look in LOOKS:
            for score in generator.choice(SCORES, look - canary.num_judged, p=shares):
                canary.add_score(float(score))
            if any(each.is_exceeded for each in compare(ArmSums(), canary, JUDGED)):
                yield look
                break


def test_a_canary_that_the_judge_finds_equal_ends_in_less_than_one_of_a_hundred_runs() -> None:
    assert len(list(judged_ends(8, EQUAL))) < FALSE_ALARMS * NUM_RUNS


def test_a_canary_at_the_judges_limit_ends_in_less_than_one_of_a_hundred_runs() -> None:
    assert np.dot(SCORES, AT_THE_LIMIT) == pytest.approx(0.4)
    assert len(list(judged_ends(9, AT_THE_LIMIT))) < FALSE_ALARMS * NUM_RUNS


def test_a_canary_that_the_judge_finds_worse_ends_within_two_hundred_comparisons() -> None:
    after = list(judged_ends(10, WORSE))
    assert sum(look <= 220 for look in after) >= 0.95 * NUM_RUNS


def test_verdicts_count_alike_whether_there_are_few_or_none() -> None:
    canary = ArmSums()
    assert compare(ArmSums(), canary, JUDGED) == []
    for _ in range(JUDGED.min_requests):
        assert compare(ArmSums(), canary, JUDGED) == []
        canary.add_score(0.0)
    (compared,) = compare(ArmSums(), canary, JUDGED)
    assert compared.is_exceeded
    assert compared.describe() == (
        "judge: the canary won 0.00 % of 100 comparisons, a tie counting half; "
        "limit 0.1 below one half"
    )
    assert compare(ArmSums(), canary, replace(JUDGED, judge=None)) == []


OBSERVED: list[tuple[Observation, Callable[[ArmSums], bool]]] = [
    (Observation(is_error=True), lambda sums: (sums.num_errors, sums.num_answers) == (1, 0)),
    (Observation(), lambda sums: (sums.num_requests, sums.num_answers) == (1, 0)),
    (Observation(is_refusal=True), lambda sums: (sums.num_refusals, sums.num_lengths) == (1, 0)),
    (
        Observation(is_refusal=False, num_tokens=1),
        lambda sums: (sums.num_lengths, sums.log_length_sum, sums.num_times) == (1, 0.0, 0),
    ),
    (
        Observation(is_refusal=False, num_tokens=7, token_seconds=0.5),
        lambda sums: (sums.num_times, sums.log_time_sum) == (1, math.log(0.5)),
    ),
]


@pytest.mark.parametrize(("seen", "is_counted"), OBSERVED)
def test_a_request_counts_for_what_it_shows(
    seen: Observation, is_counted: Callable[[ArmSums], bool]
) -> None:
    sums = ArmSums()
    sums.add(seen)
    assert sums.num_requests == 1
    assert is_counted(sums)
