"""The part that predictions omit, measured on steps with known durations."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from loraplex.engine.speculation.overruns import MOST, Overruns

STEP, LEFT_OUT = 10e-3, 2e-3


def run(overruns: Overruns, num_steps: int, *proposers: str, seconds: float) -> None:
    for _ in range(num_steps):
        overruns.observe(proposers, STEP, seconds)


def test_steps_that_take_as_long_as_predicted_leave_nothing_out() -> None:
    overruns = Overruns("p")
    assert overruns.of("p") == 0.0
    run(overruns, 50, "p", seconds=STEP)
    assert overruns.of("p") == 0.0


def test_what_is_left_out_again_and_again_is_found() -> None:
    overruns = Overruns("pq")
    run(overruns, 50, "p", seconds=STEP + LEFT_OUT)
    assert 0.7 * LEFT_OUT < overruns.of("p") <= LEFT_OUT
    assert overruns.of("q") == 0.0


def test_one_step_says_little() -> None:
    overruns = Overruns("p")
    run(overruns, 1, "p", seconds=STEP + LEFT_OUT)
    assert overruns.of("p") < 0.2 * LEFT_OUT


def test_what_steps_without_drafts_take_too_is_not_laid_to_drafts() -> None:
    overruns = Overruns("p")
    for _ in range(200):
        run(overruns, 1, seconds=STEP + LEFT_OUT)
        run(overruns, 1, "p", seconds=STEP + LEFT_OUT)
    assert overruns.of("p") < 0.2 * LEFT_OUT


def test_proposers_of_one_step_share_what_it_left_out() -> None:
    overruns = Overruns("pq")
    run(overruns, 100, "p", "q", seconds=STEP + LEFT_OUT)
    assert overruns.of("p") == overruns.of("q") <= LEFT_OUT / 2


def test_drafts_that_are_cheaper_than_predicted_win_nothing_by_it() -> None:
    overruns = Overruns("p")
    run(overruns, 50, "p", seconds=STEP / 2)
    assert overruns.of("p") == 0.0


def test_a_stall_however_long_counts_no_more_than_a_few_steps() -> None:
    overruns = Overruns("p")
    run(overruns, 1, "p", seconds=3600.0)
    assert overruns.of("p") <= (MOST - 1) * STEP / 2


def test_it_is_forgotten_while_nothing_is_drafted() -> None:
    overruns = Overruns("p")
    run(overruns, 50, "p", seconds=STEP + LEFT_OUT)
    known = overruns.of("p")
    run(overruns, 10, seconds=STEP)
    assert overruns.of("p") > 0.8 * known
    run(overruns, 400, seconds=STEP)
    assert overruns.of("p") < 0.2 * known


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_the_more_uneven_steps_are_the_more_is_feared_but_far_less_than_they_differ(
    noise: float,
) -> None:
    overruns, rng = Overruns("p"), random.Random(1)
    feared = []
    for _ in range(500):
        overruns.observe(["p"], STEP, STEP * rng.uniform(1 - noise, 1 + noise))
        overruns.observe([], STEP, STEP * rng.uniform(1 - noise, 1 + noise))
        feared.append(overruns.of("p") / STEP)
    deviation = noise / 3**0.5
    assert 0.1 * deviation < mean(feared[50:]) < 0.3 * deviation
    assert max(feared) < deviation
