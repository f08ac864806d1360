from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.memory.budget import INTERVAL_SECONDS, Bounds, Budget

BOUNDS = Bounds(total=1000, least_adapters=100, least_kv=200, step=50)
LOSSES = st.floats(0, 100)


def decided(budget: Budget, adapter_seconds: float, kv_seconds: float, times: int = 1) -> int:
    """The adapters' bytes after so many decisions, with these losses before each."""
    for _ in range(times):
        now = budget._decided_at + INTERVAL_SECONDS
        budget.decide(adapter_seconds, kv_seconds, now)
    return budget.adapter_bytes


def test_a_border_stays_while_nothing_is_lost() -> None:
    assert decided(Budget(BOUNDS, 300, 0.0), 0.0, 0.0, times=20) == 300


def test_the_side_that_loses_more_gets_one_step() -> None:
    assert decided(Budget(BOUNDS, 300, 0.0), 1.0, 0.2) == 350
    assert decided(Budget(BOUNDS, 300, 0.0), 0.2, 1.0) == 250


def test_nearly_equal_losses_move_nothing() -> None:
    assert decided(Budget(BOUNDS, 300, 0.0), 1.0, 0.9, times=20) == 300
    assert decided(Budget(BOUNDS, 300, 0.0), 0.9, 1.0, times=20) == 300


def test_losses_of_a_moment_move_nothing() -> None:
    assert decided(Budget(BOUNDS, 300, 0.0), 0.001, 0.0, times=5) == 300


def test_a_border_stops_at_the_floor_of_each_side() -> None:
    assert decided(Budget(BOUNDS, 300, 0.0), 1.0, 0.0, times=50) == 800
    assert decided(Budget(BOUNDS, 300, 0.0), 0.0, 1.0, times=50) == 100


def test_losses_of_long_ago_count_no_more() -> None:
    budget = Budget(BOUNDS, 300, 0.0)
    assert decided(budget, 5.0, 0.0) == 350
    budget.decide(0.0, 0.0, budget._decided_at + 100)
    before = budget.adapter_bytes
    assert decided(budget, 0.0, 1.0) == before - 50


def test_an_adapter_that_waits_for_room_gets_as_much_as_it_needs() -> None:
    budget = Budget(BOUNDS, 300, 0.0)
    assert budget.decide(0.0, 9.0, 1.0, needed=501) == 550
    assert budget.decide(0.0, 9.0, 2.0, needed=10**9) == 800


def test_a_decision_is_due_after_the_interval() -> None:
    budget = Budget(BOUNDS, 300, 10.0)
    assert not budget.is_due(10.0)
    assert budget.is_due(10.0 + INTERVAL_SECONDS)


@given(st.lists(st.tuples(LOSSES, LOSSES, st.integers(0, 2000)), max_size=40))
def test_no_losses_push_a_border_beyond_its_bounds(
    history: list[tuple[float, float, int]],
) -> None:
    budget, now = Budget(BOUNDS, 300, 0.0), 0.0
    for adapter_seconds, kv_seconds, needed in history:
        now += INTERVAL_SECONDS
        bytes_before = budget.adapter_bytes
        found = budget.decide(adapter_seconds, kv_seconds, now, needed=needed)
        assert BOUNDS.least_adapters <= found <= BOUNDS.most_adapters
        assert found - bytes_before <= BOUNDS.step or found < needed + BOUNDS.step


@pytest.mark.parametrize("start", [50, 850])
def test_a_border_outside_its_bounds_is_a_mistake(start: int) -> None:
    with pytest.raises(AssertionError):
        Budget(BOUNDS, start, 0.0)
