"""Confidence intervals, against published values and exhaustive ones."""

from __future__ import annotations

import itertools
import random
from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest

from loraplex.api.evaluation.intervals import bootstrap, interval, wilson


@pytest.mark.parametrize(
    ("num_successes", "num_cases", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_shares_have_the_intervals_of_newcombes_table(
    num_successes: int, num_cases: int, low: float, high: float
) -> None:
    found = wilson(num_successes, num_cases)  # Newcombe, 1998, method 3
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    assert found.mean == num_successes / num_cases


def test_the_bounds_are_the_shares_that_a_test_would_just_admit() -> None:
    z = NormalDist().inv_cdf(0.975)
    for num_cases in (1, 5, 100):
        for num_successes in range(num_cases + 1):
            found = wilson(num_successes, num_cases)
            for bound in (found.low, found.high):
                deviation = (bound * (1 - bound) / num_cases) ** 0.5
                assert abs(found.mean - bound) == pytest.approx(z * deviation, abs=1e-9)
            assert 0 <= found.low <= found.mean <= found.high <= 1


def test_the_bootstrap_of_few_values_is_that_of_all_resamples() -> None:
    values = [0.1, 0.4, 0.5, 0.95]
    every = [fmean(drawn) for drawn in itertools.product(values, repeat=4)]
    low, high = np.quantile(every, (0.025, 0.975))
    found = bootstrap(values)
    assert found.low == pytest.approx(low, abs=0.03)
    assert found.high == pytest.approx(high, abs=0.03)
    assert found == bootstrap(values), "the seed is fixed"


def test_the_bootstrap_of_many_values_is_the_normal_interval() -> None:
    draw = random.Random(1)
    values = [draw.random() for _ in range(2000)]
    half = 1.96 * pstdev(values) / len(values) ** 0.5
    found = bootstrap(values)
    assert found.mean == pytest.approx(fmean(values))
    assert found.low == pytest.approx(found.mean - half, abs=half / 10)
    assert found.high == pytest.approx(found.mean + half, abs=half / 10)


def test_scores_of_0_and_1_are_a_share_and_others_a_mean() -> None:
    assert interval([0.0, 1.0, 1.0]) == wilson(2, 3)
    assert interval([0.0, 1.0, 0.5]) == bootstrap([0.0, 1.0, 0.5])
