"""The tokens of a job's steps, under kills: compared with the sum over all steps."""

from __future__ import annotations

import random

import pytest

from loraplex.api.tuning.token_count import TokenCount


def test_a_step_counts_once_however_often_it_is_repeated() -> None:
    count = TokenCount(0, 0)
    for step in (1, 2, 3, 2, 3, 3, 4):
        count.note_step(step, 10)
    assert (count.step, count.num_tokens) == (4, 40)


def test_steps_whose_reports_were_lost_are_in_the_next_total() -> None:
    count = TokenCount(2, 20)
    count.note_step(5, 10)
    assert (count.step, count.num_tokens) == (2, 20)
    count.note_total(8, 80)
    assert (count.step, count.num_tokens) == (8, 80)


def test_the_total_of_an_old_checkpoint_takes_nothing_back() -> None:
    count = TokenCount(7, 70)
    count.note_total(4, 40)
    assert (count.step, count.num_tokens) == (7, 70)


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_is_exact_whatever_is_killed(seed: int) -> None:
    """The server keeps what it knew at a random earlier moment, the trainer its last checkpoint."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 99) for _ in range(50)]
    kept, checkpoint = (0, 0), 0
    for _ in range(rng.randint(1, 8)):
        count = TokenCount(*kept)
        count.note_total(checkpoint, sum(sizes[:checkpoint]))
        end = rng.randint(checkpoint, len(sizes))
        for step in range(checkpoint + 1, end + 1):
            count.note_step(step, sizes[step - 1])
            assert count.step >= step, "a trainer is never ahead of what is counted"
            assert count.num_tokens == sum(sizes[: count.step])
            if step % 7 == 0:
                checkpoint = step
                if rng.random() < 0.8:  # else the server is killed before it hears of it
                    count.note_total(step, sum(sizes[:step]))
            if rng.random() < 0.5:
                kept = count.step, count.num_tokens
    count = TokenCount(*kept)
    for step in range(checkpoint + 1, len(sizes) + 1):
        count.note_step(step, sizes[step - 1])
    count.note_total(len(sizes), sum(sizes))
    assert (count.step, count.num_tokens) == (len(sizes), sum(sizes))
