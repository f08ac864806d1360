"""Targets follow the traffic up at once and down after 30 s."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.fleet.warm_targets import WarmTargets


@given(st.floats(0, 1000), st.floats(0.1, 100))
def test_the_target_is_the_traffic_relative_to_a_share_of_a_replica(
    traffic: float, capacity: float
) -> None:
    targets = WarmTargets(capacity)
    targets.update({"a": traffic}, now=0.0)
    assert targets.of("a") == ceil(traffic / (0.35 * capacity))


@pytest.mark.parametrize(("seconds", "expected"), [(29.9, 3), (30.0, 1)])
def test_a_target_falls_when_it_was_too_high_for_30_seconds(seconds: float, expected: int) -> None:
    targets = WarmTargets(20)
    targets.update({"a": 15}, now=100.0)
    targets.update({"a": 5}, now=101.0)
    assert targets.of("a") == 3
    targets.update({"a": 5}, now=100.0 + seconds)
    assert targets.of("a") == expected


def test_traffic_that_returns_begins_the_30_seconds_anew() -> None:
    targets = WarmTargets(20)
    for now, traffic in ((0.0, 15), (20.0, 5), (25.0, 15), (50.0, 5)):
        targets.update({"a": traffic}, now=now)
    assert targets.of("a") == 3


def test_an_adapter_without_traffic_is_forgotten() -> None:
    targets = WarmTargets(20)
    targets.update({"a": 1}, now=0.0)
    targets.update({}, now=30.0)
    assert targets.of("a") == 0
