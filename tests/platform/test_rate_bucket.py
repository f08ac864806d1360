"""The token bucket compared with an integer reference, with clocks that jump."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.quotas.bucket import Bucket, Reading

CLOCK = "clock"
FIVE_MINUTES = 300

Step = tuple[str, int]

COSTS = st.integers(0, 40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 90)),
        st.tuples(st.just("take"), COSTS),
        st.tuples(st.just("jump"), st.sampled_from([-FIVE_MINUTES, FIVE_MINUTES])),
        st.tuples(st.just("reboot"), st.integers(0, 3)),
    ),
    max_size=60,
)


@dataclass
class Reference:
    """The rule in exact numbers: in 60ths of a token, by a clock that counts whole seconds."""

    capacity: int
    level: Fraction
    seconds: int = 1000
    shown: int = 1000
    clock: str = CLOCK

    def refill(self, seconds: int, clock: str) -> None:
        gained = seconds - self.shown if clock == self.clock else 0
        self.shown, self.clock = seconds, clock
        self.level = min(Fraction(self.capacity), self.level + max(0, gained) * self.rate)

    @property
    def rate(self) -> Fraction:
        return Fraction(self.capacity, 60)

    def take(self, cost: int) -> bool:
        if cost > 0 and self.level < min(cost, self.capacity):
            return False
        self.level -= cost
        return True


def take(bucket: Bucket, cost: int, now: Reading) -> tuple[Bucket, bool]:
    bucket = bucket.refilled(now)
    return (bucket.paid(cost), True) if bucket.passes(cost) else (bucket, False)


@given(capacity=st.integers(1, 30), steps=STEPS)
def test_decides_as_the_reference_under_any_clock(capacity: int, steps: list[Step]) -> None:
    reference = Reference(capacity, Fraction(capacity))
    seconds, clock = 1000, CLOCK
    bucket = Bucket.full(capacity, Reading(clock, seconds))
    for kind, number in steps:
        if kind in ("wait", "jump"):
            seconds += number
        elif kind == "reboot":
            seconds, clock = number, f"{CLOCK}-{number}"
        else:
            bucket, passed = take(bucket, number, Reading(clock, seconds))
            reference.refill(seconds, clock)
            assert passed == reference.take(number)
            assert bucket.level == pytest.approx(float(reference.level), abs=1e-6)


@given(capacity=st.integers(1, 30), steps=STEPS)
def test_gives_what_flowed_in_and_one_request_and_one_filling_for_each_jump(
    capacity: int, steps: list[Step]
) -> None:
    seconds, num_reboots, elapsed, num_jumps, given_out, largest = 1000, 0, 0, 0, 0, 0
    bucket = Bucket.full(capacity, Reading(CLOCK, seconds))
    for kind, number in steps:
        if kind == "wait":
            seconds, elapsed = seconds + number, elapsed + number
        elif kind == "jump":
            seconds, num_jumps = seconds + number, num_jumps + (number > 0)
        elif kind == "reboot":
            seconds, num_reboots = number, num_reboots + 1
        else:
            now = Reading(f"{CLOCK}{num_reboots or ''}", seconds)
            bucket, passed = take(bucket, number, now)
            given_out += number * passed
            largest = max(largest, number)
    flowed_in = capacity * elapsed / 60
    assert given_out <= (capacity + largest) * (1 + num_jumps) + flowed_in + 1e-3


@given(
    capacity=st.integers(1, 1000),
    level=st.integers(-2000, 1000),
    cost=st.integers(1, 3000),
    fraction=st.floats(0.0, 0.99),
)
def test_says_exactly_when_a_request_passes(
    capacity: int, level: int, cost: int, fraction: float
) -> None:
    bucket = Bucket(capacity, min(level, capacity), Reading(CLOCK, 50.0))
    seconds = bucket.seconds_until(cost)
    assert bucket.refilled(Reading(CLOCK, 50.0 + seconds)).passes(cost)
    if seconds > 0:
        assert not bucket.refilled(Reading(CLOCK, 50.0 + seconds * fraction)).passes(cost)


@pytest.mark.parametrize("cost", [1, 5, 7, 500])
def test_a_request_above_the_capacity_passes_a_full_bucket_only(cost: int) -> None:
    full = Bucket.full(5, Reading(CLOCK, 0.0))
    assert full.passes(cost)
    assert full.paid(1).passes(cost) == (cost < 5)


def test_what_is_given_back_never_overflows() -> None:
    bucket = Bucket.full(5, Reading(CLOCK, 0.0)).paid(2)
    assert bucket.paid(-3).level == 5
