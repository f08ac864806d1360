"""The simulation runs without violations, replays exactly, and detects every injected defect."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.planted import LIKELY_SEEDS, MISTAKES, is_caught
from simulation.runner import REQUIRED_COVERAGE, STEPS_PER_SEED, Report, run_seed, run_seeds

ROOT = Path(__file__).parents[2]
NUM_STEPS = 20_000
"""`make simulate` takes a million, and plants every mistake."""
QUICKLY_FOUND = (
    "skips_a_decref",
    "publishes_early",
    "drops_the_tenant_from_the_key",
    "waits_for_absent_adapters",
    "spends_no_budget",
    "counts_rejected_tokens_as_computed",
    "gives_outputs_away",
    "evicts_leased_adapters",
    "keeps_leases",
    "leaves_deleted_adapters_in_host_memory",
)
"""One of each part of the scheduler and of paging."""


@pytest.fixture(autouse=True)
def _no_logs_of_failures() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_many_random_worlds_keep_every_invariant() -> None:
    report = run_seeds(range(NUM_STEPS // STEPS_PER_SEED))
    assert report.violations == {}
    assert report.num_leaked == 0
    assert report.num_steps >= NUM_STEPS
    assert all(report.coverage[name] for name in REQUIRED_COVERAGE)
    assert report.coverage["successes"] > report.num_steps // 10, "most of it is ordinary work"


def test_a_seed_replays_identically_in_another_process_without_torch() -> None:
    script = (
        "import sys; from simulation.runner import run_seed; print(run_seed(5, 200).log_hash); "
        "assert 'torch' not in sys.modules"
    )
    hashes = {_run_python("-c", script, hash_seed=seed).strip() for seed in ("1", "2")}
    assert hashes == {run_seed(5, 200).log_hash}
    assert run_seed(6, 200).log_hash not in hashes


def test_the_last_line_of_a_run_is_its_report() -> None:
    # Of seeds whose worlds end early: from 1,000 steps on rare events are required.
    arguments = ("--steps", "800", "--seed", "2", "--without-planted")
    output = _run_python("-m", "simulation", *arguments, hash_seed="0")
    report = json.loads(output.splitlines()[-1])
    assert (report["seeds"], report["violations"], report["leaked"]) == (2, 0, 0)
    assert report["steps"] >= 800
    assert report["coverage"]["requests"] > 0


def test_one_seed_is_replayed_with_its_log() -> None:
    output = _run_python("-m", "simulation", "--only", "5", hash_seed="0").splitlines()
    assert output[-1] == f"{run_seed(5).log_hash} no violation"
    assert len(output) > STEPS_PER_SEED


def _run_python(*arguments: str, hash_seed: str) -> str:
    path = f"{ROOT / '.src'}:{ROOT / 'tests'}"
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
    ).stdout


def test_a_failing_seed_fails_alike_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with MISTAKES["skips_a_decref"]():
        report = run_seeds((0, 3), num_processes=1, num_steps=50)
    assert sorted(report.violations) == [0, 3]
    assert report.irreproducible == []
    assert not report.is_good


@pytest.mark.parametrize("mistake", QUICKLY_FOUND)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    assert is_caught(mistake)


def test_a_likely_seed_that_misses_the_mistake_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LIKELY_SEEDS.keys() <= MISTAKES.keys()
    without_sinks = 1
    assert not run_seed(without_sinks).violation
    monkeypatch.setitem(LIKELY_SEEDS, "frees_the_sinks", without_sinks)
    assert is_caught("frees_the_sinks")


def test_there_are_as_many_mistakes_as_it_takes() -> None:
    assert len(MISTAKES) >= 20


def test_what_was_met_too_seldom_fails_a_run() -> None:
    report = Report(num_steps=1_000_000)
    report.coverage.update(dict.fromkeys(REQUIRED_COVERAGE, 1_000))
    assert report.is_good
    report.coverage["swaps"] -= 1
    assert report.rare == {"swaps": 999}
    assert not report.is_good
