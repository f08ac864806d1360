"""Which examples a step trains."""

from __future__ import annotations

import pytest

from loraplex.engine.tuning.step_plan import StepPlan

LENGTHS = [7, 3, 9, 1, 4, 4, 12, 2, 5, 6]


def plan(**changes: object) -> StepPlan:
    settings = {"num_epochs": 3, "batch_size": 4, "seed": 1, "packed_tokens": None, **changes}
    return StepPlan(LENGTHS, **settings)  # type: ignore[arg-type]


def steps(planned: StepPlan) -> list[list[list[int]]]:
    return [planned.sequences(step) for step in range(planned.num_steps)]


@pytest.mark.parametrize("packed_tokens", [None, 12])
def test_each_epoch_trains_every_example_once(packed_tokens: int | None) -> None:
    planned = plan(packed_tokens=packed_tokens)
    epoch: list[int] = []
    num_epochs = 0
    for step, sequences in enumerate(steps(planned)):
        epoch += [index for sequence in sequences for index in sequence]
        if planned.ends_epoch(step + 1):
            assert sorted(epoch) == list(range(len(LENGTHS)))
            epoch, num_epochs = [], num_epochs + 1
    assert (epoch, num_epochs) == ([], 3)


def test_packed_sequences_have_room_for_their_examples() -> None:
    planned = plan(packed_tokens=12)
    sequences = [sequence for step in steps(planned) for sequence in step]
    assert all(sum(LENGTHS[i] for i in sequence) <= 12 for sequence in sequences)
    assert max(map(len, sequences)) > 1
    assert planned.num_steps < plan().num_steps


def test_a_step_has_as_many_sequences_as_the_recipe_says() -> None:
    assert [len(step) for step in steps(plan())] == [4, 4, 2] * 3


def test_any_step_is_planned_as_in_order() -> None:
    planned = plan(packed_tokens=12)
    expected = steps(planned)
    for step in (planned.num_steps - 1, 0, 2, 1):
        assert plan(packed_tokens=12).sequences(step) == expected[step]
        assert planned.sequences(step) == expected[step]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    planned = steps(plan(batch_size=10))
    assert planned[0] != planned[1]
    assert planned != steps(plan(batch_size=10, seed=2))
