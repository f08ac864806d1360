"""Poisonous adapters end two engines at most, and the simulation notices planted mistakes."""

from __future__ import annotations

import pytest

from .adapters import Poison
from .planted import MAX_DEATHS, MISTAKES, is_caught
from .scenario import Scenario
from .world import World


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(seed=1, num_servers=1),
        Scenario(seed=2, num_servers=2, num_poisons=3),
        Scenario(seed=3, num_servers=3, num_poisons=3),
        Scenario(seed=4, poison=Poison(first_step=5)),
        Scenario(seed=5, poison=Poison(probability=0.05)),
        Scenario(seed=6, has_late_server=True),
    ],
)
def test_a_poisonous_adapter_ends_two_engines_and_holds_no_innocent_one_out(
    scenario: Scenario,
) -> None:
    outcome = World(scenario).run()
    assert len(outcome.deaths) == scenario.num_poisons
    assert outcome.most_deaths <= MAX_DEATHS
    assert not outcome.held_out
    assert outcome.num_answers > 200
    assert outcome.num_refusals > 100


def test_a_seed_replays_identically() -> None:
    scenario = Scenario(seed=7, poison=Poison(probability=0.3))
    assert World(scenario).run() == World(scenario).run()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed(name: str) -> None:
    assert is_caught(name)
