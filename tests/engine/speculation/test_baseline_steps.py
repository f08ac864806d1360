"""Which steps draft less than would pay off."""

from __future__ import annotations

from itertools import pairwise

from loraplex.engine.speculation.baseline_steps import FIRST, LONGEST, BaselineSteps


def fractions(baseline_steps: BaselineSteps, num_steps: int, num_sequences: int) -> list[float]:
    return [baseline_steps.fraction(num_sequences) for _ in range(num_steps)]


def comparing(said: list[float]) -> list[int]:
    return [step for step, part in enumerate(said, start=1) if part < 1]


def test_comparisons_come_at_doubling_intervals_and_go_on_for_good() -> None:
    steps = comparing(fractions(BaselineSteps(), 500, 8))
    gaps = [after - before for before, after in pairwise(steps)]
    assert steps[0] == FIRST
    assert gaps[:4] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert set(gaps[4:]) == {LONGEST}


def test_none_and_half_are_drafted_in_turn() -> None:
    said = [part for part in fractions(BaselineSteps(), 500, 8) if part < 1]
    assert said[:6] == [0.0, 0.5] * 3


def test_another_number_of_sequences_is_compared_at_once() -> None:
    baseline_steps = BaselineSteps()
    fractions(baseline_steps, 300, 1)
    for number in (4, 16, 2):
        assert comparing(fractions(baseline_steps, 10, number))[:2] == [1, 1 + FIRST]


def test_a_few_sequences_more_or_less_change_nothing() -> None:
    steady, wavering = BaselineSteps(), BaselineSteps()
    expected = fractions(steady, 200, 8)
    assert [wavering.fraction(5 + 10 * (step % 2)) for step in range(200)] != expected
    wavering = BaselineSteps()
    assert [wavering.fraction(8 + step % 8) for step in range(200)] == expected
