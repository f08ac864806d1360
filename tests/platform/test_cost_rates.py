"""What the engine's resources cost by the operator's rates."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import pytest

from loraplex.platform.errors import InvalidValue
from loraplex.platform.prices.cost_rates import NO_RATES, CostRates, parse_rate
from loraplex.platform.prices.money import MAX_AMOUNT


@pytest.mark.parametrize(
    ("step_nanoseconds", "kv_byte_seconds", "loaded_bytes"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (1_234_567_891, 987_654_321_012_345, 123_456_789),
        (10**17, 10**20, 10**15),
    ],
)
def test_costs_are_exact_and_rounded_once(
    step_nanoseconds: int, kv_byte_seconds: int, loaded_bytes: int
) -> None:
    rates = CostRates(parse_rate("2.5"), parse_rate("0.031"), parse_rate("0.000000007"))
    exact = (
        Decimal("2.5") * step_nanoseconds / (3600 * 10**9)
        + Decimal("0.031") * kv_byte_seconds / (3600 * 2**30)
        + Decimal("0.000000007") * loaded_bytes / 2**30
    )
    cost = rates.cost(
        step_nanoseconds=step_nanoseconds,
        kv_byte_seconds=kv_byte_seconds,
        loaded_bytes=loaded_bytes,
    )
    assert cost == (exact * 10**9).to_integral_value(ROUND_HALF_UP)


def test_half_of_the_smallest_amount_is_rounded_up() -> None:
    rates = CostRates(per_loaded_gib=1)
    costs = [
        rates.cost(step_nanoseconds=0, kv_byte_seconds=0, loaded_bytes=num_bytes)
        for num_bytes in (2**29 - 1, 2**29, 3 * 2**29)
    ]
    assert costs == [0, 1, 2]


def test_without_rates_nothing_costs_anything() -> None:
    used = {"step_nanoseconds": 10**15, "kv_byte_seconds": 10**20, "loaded_bytes": 10**12}
    assert NO_RATES.cost(**used) == 0


def test_one_request_never_costs_more_than_a_sum_can_hold() -> None:
    rates = CostRates(per_step_hour=parse_rate("1000000"))
    assert rates.cost(step_nanoseconds=10**20, kv_byte_seconds=0, loaded_bytes=0) == MAX_AMOUNT


@pytest.mark.parametrize("text", ["", "-1", "1e3", "1.0000000001", "1000001", "x"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_rate(text)
