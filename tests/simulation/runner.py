"""Runs many seeds in several processes; each seed is reproducible by itself."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import Pool

from .scenario import Scenario
from .world import Outcome, World

STEPS_PER_SEED = 400
REQUIRED_PER_MILLION = 1_000
REQUIRED_COVERAGE = (
    "aborts",
    "aborts_drafting",
    "aborts_preempted",
    "aborts_repeated",
    "aborts_running",
    "aborts_swapped",
    "aborts_waiting",
    "adapter_failures",
    "background",
    "background_preempted",
    "blocks_given_back",
    "blocks_moved",
    "border_moves",
    "bursts",
    "clock_jumps",
    "compactions",
    "computed_in_vain",
    "copies",
    "crashes",
    "deadline_expired",
    "deletes",
    "deletes_under_lease",
    "departures_drained",
    "departures_kv",
    "departures_room",
    "departures_share",
    "disconnects",
    "disk_erasures",
    "disk_misreads",
    "disk_reads",
    "disk_restored",
    "disk_waits_given_up",
    "disk_writes",
    "displaced",
    "drained",
    "drafts_in_time",
    "drafts_not",
    "drafts_over_borders",
    "drafts_partly",
    "drafts_preempted",
    "drafts_swapped",
    "drafts_wholly",
    "drains",
    "evictions",
    "failed_loads",
    "floods",
    "forks",
    "host_border_moves",
    "host_evictions",
    "host_fetches",
    "host_prefixes",
    "host_slots_given_up",
    "late",
    "moves",
    "nan_drafts",
    "nan_rows",
    "never_fit",
    "outages",
    "pins",
    "preemptions",
    "prefetches",
    "prefix_evictions",
    "prefix_hits",
    "reads",
    "reads_preempted",
    "reaps",
    "reclaims",
    "refused",
    "refused_hopeless",
    "restarts",
    "states",
    "step_exceptions",
    "steps_in_flight",
    "swaps",
    "swaps_in",
    "window_frees",
)
"""What a run must have met often enough for its silence to mean something."""


def run_seed(seed: int, num_steps: int = STEPS_PER_SEED) -> Outcome:
    return World(Scenario.draw(seed)).run(num_steps)


@dataclass
class Report:
    """The sum over seeds."""

    num_steps: int = 0
    num_seeds: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    """By seed."""
    num_leaked: int = 0
    irreproducible: list[int] = field(default_factory=list)
    """Failing seeds that went another way when run again."""
    coverage: Counter[str] = field(default_factory=Counter)
    planted: int = 0
    caught: int = 0
    _hash: hashlib.blake2b = field(default_factory=partial(hashlib.blake2b, digest_size=16))

    def add(self, outcome: Outcome) -> None:
        """Take in one seed; in the order of the seeds, or the hash differs."""
        self.num_steps += outcome.num_steps
        self.num_seeds += 1
        self.num_leaked += outcome.num_leaked
        self.coverage += outcome.coverage
        self._hash.update(outcome.log_hash.encode())
        if outcome.violation:
            self.violations[outcome.seed] = outcome.violation

    @property
    def rare(self) -> dict[str, int]:
        """What was met too seldom, and how often."""
        required = REQUIRED_PER_MILLION * self.num_steps // 1_000_000
        return {
            name: self.coverage[name]
            for name in REQUIRED_COVERAGE
            if self.coverage[name] < required
        }

    @property
    def is_good(self) -> bool:
        found = self.violations or self.num_leaked or self.irreproducible
        return not found and not self.rare and self.caught == self.planted

    def as_json(self) -> str:
        return json.dumps(
            {
                "steps": self.num_steps,
                "seeds": self.num_seeds,
                "violations": len(self.violations),
                "leaked": self.num_leaked,
                "planted": self.planted,
                "caught": self.caught,
                "irreproducible": self.irreproducible,
                "coverage": dict(sorted(self.coverage.items())),
                "log_hash": self._hash.hexdigest(),
            }
        )


def run_seeds(
    seeds: Iterable[int], *, num_processes: int | None = None, num_steps: int = STEPS_PER_SEED
) -> Report:
    """Run each seed; whichever fails is run again, to see whether it fails alike."""
    report = Report()
    run = partial(run_seed, num_steps=num_steps)
    if num_processes == 1:
        for seed in seeds:
            report.add(run(seed))
    else:
        with process_pool(num_processes) as pool:
            for outcome in pool.imap(run, seeds, chunksize=4):
                report.add(outcome)
    for seed in list(report.violations)[:3]:
        if len({run(seed).log_hash, run(seed).log_hash}) > 1:
            report.irreproducible.append(seed)
    return report


def process_pool(num_processes: int | None) -> Pool:
    """Processes that simulate; None: one for each core."""
    spawned = multiprocessing.get_context("spawn")  # with no lock of a forked thread
    return spawned.Pool(num_processes or os.cpu_count(), _prepare_process)


def _prepare_process() -> None:
    """Worlds are cyclic garbage, but few and small: collecting seldom is cheaper."""
    logging.disable(logging.ERROR)  # failed loads and steps are what the nemesis is there for
    gc.set_threshold(50_000, 20, 100)
