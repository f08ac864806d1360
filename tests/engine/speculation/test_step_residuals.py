"""What predictions leave out, measured against steps whose true durations are known."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from loraplex.engine.speculation.step_residuals import MOST, StepResiduals

STEP, LEFT_OUT = 10e-3, 2e-3


def run(step_residuals: StepResiduals, num_steps: int, *proposers: str, seconds: float) -> None:
    for _ in range(num_steps):
        step_residuals.observe(proposers, STEP, seconds)


def test_steps_that_take_as_long_as_predicted_leave_nothing_out() -> None:
    step_residuals = StepResiduals("p")
    assert step_residuals.of("p") == 0.0
    run(step_residuals, 50, "p", seconds=STEP)
    assert step_residuals.of("p") == 0.0


def test_what_is_left_out_again_and_again_is_found() -> None:
    step_residuals = StepResiduals("pq")
    run(step_residuals, 50, "p", seconds=STEP + LEFT_OUT)
    assert 0.7 * LEFT_OUT < step_residuals.of("p") <= LEFT_OUT
    assert step_residuals.of("q") == 0.0


def test_one_step_says_little() -> None:
    step_residuals = StepResiduals("p")
    run(step_residuals, 1, "p", seconds=STEP + LEFT_OUT)
    assert step_residuals.of("p") < 0.2 * LEFT_OUT


def test_what_steps_without_drafts_take_too_is_not_laid_to_drafts() -> None:
    step_residuals = StepResiduals("p")
    for _ in range(200):
        run(step_residuals, 1, seconds=STEP + LEFT_OUT)
        run(step_residuals, 1, "p", seconds=STEP + LEFT_OUT)
    assert step_residuals.of("p") < 0.2 * LEFT_OUT


def test_proposers_of_one_step_share_what_it_left_out() -> None:
    step_residuals = StepResiduals("pq")
    run(step_residuals, 100, "p", "q", seconds=STEP + LEFT_OUT)
    assert step_residuals.of("p") == step_residuals.of("q") <= LEFT_OUT / 2


def test_drafts_that_are_cheaper_than_predicted_win_nothing_by_it() -> None:
    step_residuals = StepResiduals("p")
    run(step_residuals, 50, "p", seconds=STEP / 2)
    assert step_residuals.of("p") == 0.0


def test_a_stall_however_long_counts_no_more_than_a_few_steps() -> None:
    step_residuals = StepResiduals("p")
    run(step_residuals, 1, "p", seconds=3600.0)
    assert step_residuals.of("p") <= (MOST - 1) * STEP / 2


def test_it_is_forgotten_while_nothing_is_drafted() -> None:
    step_residuals = StepResiduals("p")
    run(step_residuals, 50, "p", seconds=STEP + LEFT_OUT)
    known = step_residuals.of("p")
    run(step_residuals, 10, seconds=STEP)
    assert step_residuals.of("p") > 0.8 * known
    run(step_residuals, 400, seconds=STEP)
    assert step_residuals.of("p") < 0.2 * known


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_the_more_uneven_steps_are_the_more_is_feared_but_far_less_than_they_differ(
    noise: float,
) -> None:
    step_residuals, rng = StepResiduals("p"), random.Random(1)
    feared = []
    for _ in range(500):
        step_residuals.observe(["p"], STEP, STEP * rng.uniform(1 - noise, 1 + noise))
        step_residuals.observe([], STEP, STEP * rng.uniform(1 - noise, 1 + noise))
        feared.append(step_residuals.of("p") / STEP)
    deviation = noise / 3**0.5
    assert 0.1 * deviation < mean(feared[50:]) < 0.3 * deviation
    assert max(feared) < deviation
