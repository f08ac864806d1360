"""The slope and its confidence interval: compared with numpy and published tables, and its
coverage.

`student_quantile` is compared with the table in NIST's handbook (1.3.6.7.2).
"""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.growth import block_means, growth_of, student_quantile

MINUTES = 40


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (25, 2.060), (38, 2.024), (100, 1.984)],
)
def test_the_quantile_is_that_of_the_table(degrees: int, quantile: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, abs=6e-4)


def test_the_slope_is_that_of_least_squares() -> None:
    draw = np.random.default_rng(1)
    seconds = np.arange(MINUTES) * 60.0 + 30
    values = 100 + 0.01 * seconds + draw.normal(size=MINUTES)
    (slope, _), covariance = np.polyfit(seconds / 3600, values, 1, cov=True)
    growth = growth_of(seconds.tolist(), values.tolist())
    assert growth.per_hour == pytest.approx(slope)
    least_reach = student_quantile(0.975, MINUTES - 2) * np.sqrt(covariance[0, 0])
    assert growth.high - growth.per_hour >= least_reach * (1 - 1e-9)
    assert growth.high - growth.per_hour == pytest.approx(growth.per_hour - growth.low)


def test_a_straight_line_is_certain() -> None:
    seconds = [5.0 * number for number in range(MINUTES * 12)]
    growth = growth_of(seconds, [7 + second / 1800 for second in seconds])
    assert (growth.per_hour, growth.low, growth.high) == pytest.approx((2.0, 2.0, 2.0))


def test_samples_are_averaged_by_the_minute() -> None:
    assert block_means([0, 30, 59, 120, 130], [1, 2, 3, 5, 7]) == ([89 / 3, 125], [2, 6])


def test_the_interval_holds_the_truth_though_samples_depend_on_each_other() -> None:
    """Five hundred histories whose samples every 5 s resemble those of the last minute; of
    ordinary least squares over the samples, 32 of a hundred intervals hold it."""
    draw = np.random.default_rng(2)
    seconds = np.arange(MINUTES * 12) * 5.0
    num_right = 0
    for _ in range(500):
        noise = draw.normal(size=len(seconds))
        for index in range(1, len(noise)):
            noise[index] += 0.92 * noise[index - 1]
        growth = growth_of(seconds.tolist(), (3 * seconds / 3600 + noise).tolist())
        num_right += growth.low <= 3 <= growth.high
    assert num_right >= 465


def test_too_short_a_history_has_no_slope() -> None:
    with pytest.raises(ValueError, match="3 minutes"):
        growth_of([0, 70, 130], [1, 2, 3])
