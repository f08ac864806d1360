"""When a trainer runs beside the engine."""

from __future__ import annotations

from loraplex.api.tuning.turns import (
    IDLE_SECONDS,
    LONGEST_WAIT_SECONDS,
    TURN_SECONDS,
    Turns,
)

TICK = 0.25


def run(turns: Turns, begin: float, seconds: float, *, is_busy: bool) -> list[bool]:
    """The decisions of this time."""
    ticks = range(1, int(seconds / TICK) + 1)
    return [turns.decide(begin + tick * TICK, is_busy=is_busy) for tick in ticks]


def test_an_idle_engine_never_interrupts_training() -> None:
    assert all(run(Turns(0.0), 0.0, 100.0, is_busy=False))


def test_training_pauses_at_once_and_goes_on_when_the_engine_was_idle_for_a_moment() -> None:
    turns = Turns(0.0)
    assert turns.decide(1.0, is_busy=True) is False
    assert turns.decide(1.0 + IDLE_SECONDS - 0.01, is_busy=False) is False
    assert turns.decide(1.0 + IDLE_SECONDS, is_busy=False) is True


def test_an_engine_that_is_never_idle_leaves_training_a_share() -> None:
    seconds = 10 * (LONGEST_WAIT_SECONDS + TURN_SECONDS)
    decisions = run(Turns(0.0), 0.0, seconds, is_busy=True)
    share = sum(decisions) / len(decisions)
    expected = TURN_SECONDS / (LONGEST_WAIT_SECONDS + TURN_SECONDS)
    assert abs(share - expected) < 0.02


def test_short_gaps_between_requests_are_no_idle_time() -> None:
    turns = Turns(0.0)
    decisions = [
        turns.decide(number * TICK, is_busy=number % 3 == 0)
        for number in range(int(LONGEST_WAIT_SECONDS / TICK))
    ]
    assert not any(decisions)
