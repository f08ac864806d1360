"""Mistakes that the simulation must notice: one of our rules is missing in each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

from loraplex.engine.errors import EngineRestarted
from loraplex.engine.fleet import routed_requests
from loraplex.engine.fleet.replica import Replica
from loraplex.engine.fleet.routed_requests import RoutedRequests
from loraplex.engine.messages import EngineCrashed
from loraplex.engine.process import proven_adapters
from loraplex.engine.process.quarantine import Quarantine, Suspect

from .adapters import Poison
from .scenario import Scenario
from .world import World

MAX_DEATHS = 2


class Mistake(NamedTuple):
    patch: AbstractContextManager[object]
    scenario: Scenario
    holds_out: bool = False
    """Whether it is noticed by an innocent adapter that is held out, and not by engines that
    end."""


def _tell_only_who_is_there(replica: Replica, crash: EngineCrashed) -> None:
    replica._tell(replace(crash, number=replica.engine.num_restarts + 1))


def _blame(quarantine: Quarantine, suspect: Suspect, at: float, *, is_alone: bool) -> None:
    quarantine._suspicion(suspect, at).is_culprit = True


MISTAKES: Mapping[str, Mistake] = {
    "spreads_unproven_adapters": Mistake(
        mock.patch.object(RoutedRequests, "_is_proven", return_value=True),
        Scenario(seed=1),
    ),
    "sends_confined_requests_on_from_a_full_queue": Mistake(
        mock.patch.object(routed_requests, "NotNow", EngineRestarted),
        Scenario(seed=1, num_poisons=3),
    ),
    "retries_suspects_beside_others": Mistake(
        mock.patch.object(Quarantine, "num_lone_steps", return_value=0),
        Scenario(seed=1, num_poisons=3),
    ),
    "clears_suspects_by_one_answer": Mistake(
        mock.patch.multiple(proven_adapters, PROOF_ANSWERS=1, PROOF_SECONDS=0.0),
        Scenario(seed=1, num_poisons=3, poison=Poison(first_step=5)),
    ),
    "believes_the_answers_of_short_requests": Mistake(
        mock.patch.object(proven_adapters, "PROOF_SECONDS", 0.0),
        Scenario(seed=1, num_poisons=3, poison=Poison(first_step=25)),
    ),
    "tells_late_servers_nothing": Mistake(
        mock.patch.object(Replica, "note_crash", _tell_only_who_is_there),
        Scenario(seed=1, has_late_server=True),
    ),
    "keeps_out_who_was_only_there": Mistake(
        mock.patch.object(Quarantine, "_note_crash", _blame),
        Scenario(seed=1, num_poisons=3),
        holds_out=True,
    ),
}


def is_caught(name: str) -> bool:
    """Whether the outcome with this mistake is one that must not be."""
    mistake = MISTAKES[name]
    with mistake.patch:
        outcome = World(mistake.scenario).run()
    return bool(outcome.held_out) if mistake.holds_out else outcome.most_deaths > MAX_DEATHS
