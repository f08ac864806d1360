"""Handovers keep every invariant on simulated fleets, and planted mistakes are caught."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from support.marks import marked_slow

from .planted import MISTAKES, caught_by
from .runs import REQUIRED
from .world import run_seed

LONG = {"drops_the_last_piece", "waits_for_a_dead_replica"}
"""They take many rounds to be caught."""


@pytest.fixture(autouse=True)
def _no_logs_of_failures() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_handovers_keep_every_invariant_through_losses_and_deletions() -> None:
    counts: Counter[str] = Counter()
    for seed in range(8):
        outcome = run_seed(seed, 200)
        assert outcome.violation is None
        counts += outcome.counts
    assert [name for name in REQUIRED if not counts[name]] == []


def test_a_seed_replays_identically() -> None:
    assert run_seed(3, 100) == run_seed(3, 100)
    assert run_seed(3, 100).log_hash != run_seed(4, 100).log_hash


@pytest.mark.parametrize("name", marked_slow(MISTAKES, slow=LONG))
def test_a_planted_mistake_is_caught_by_the_invariant_that_it_breaks(name: str) -> None:
    caught = caught_by(name)
    assert caught is not None
    assert MISTAKES[name][1].value in caught
