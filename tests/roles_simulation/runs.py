"""Runs many seeds in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from simulation.runner import process_pool

from .world import Outcome, run_seed

ROUNDS_PER_SEED = 400
REQUIRED_PER_MILLION = 500
REQUIRED = (
    "aborts",
    "deletions",
    "given_up",
    "handovers",
    "kills_of_decode",
    "kills_of_prefill",
    "late_pieces",
    "pieces",
    "stored_blocks",
)
"""What a run must have met often enough for its silence to mean something."""


def run_seeds(seeds: Iterable[int]) -> Iterator[Outcome]:
    with process_pool(None) as pool:
        yield from pool.imap(partial(run_seed, num_rounds=ROUNDS_PER_SEED), seeds, chunksize=4)


def rare_of(counts: Counter[str], num_rounds: int) -> list[str]:
    """What was met too seldom."""
    required = REQUIRED_PER_MILLION * num_rounds // 1_000_000
    return [name for name in REQUIRED if counts[name] < required]
