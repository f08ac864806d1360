"""Runs every policy under every load and seed, and compares ours with the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context

from .outcome import Outcome
from .policies import OURS, POLICIES, make_policy
from .scenario import Size
from .world import World

LOADS = (0.5, 0.7, 0.85, 0.95)
SUSTAINED_SECONDS = 0.5
"""A fleet in which more than this time's arrivals wait at the end does not sustain the load."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, one load, one seed."""

    size: Size
    load: float
    seed: int
    policy: str

    def outcome(self) -> Outcome:
        scenario = self.size.scenario(self.seed, self.load)
        make = partial(make_policy, self.policy)
        return World(scenario, make, is_checked=self.policy == OURS).run()

    def row(self) -> dict[str, object]:
        outcome = self.outcome()
        arrivals = SUSTAINED_SECONDS * self.size.scenario(self.seed, self.load).requests_per_second
        return {
            "num_replicas": self.size.num_replicas,
            "num_adapters": self.size.num_adapters,
            "load": self.load,
            "seed": self.seed,
            "policy": self.policy,
            "is_sustained": outcome.num_waiting <= arrivals,
            **asdict(outcome),
        }


def all_runs(size: Size, seeds: Iterable[int], loads: Sequence[float] = LOADS) -> list[Run]:
    return [
        Run(size, load, seed, policy) for seed in seeds for load in loads for policy in POLICIES
    ]


def rows_of(runs: Sequence[Run], num_processes: int) -> Iterator[dict[str, object]]:
    with get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(_row, runs)


def _row(run: Run) -> dict[str, object]:
    return run.row()
