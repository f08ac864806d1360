"""Drafts from outputs of earlier requests, beside prompt lookup and plain decoding.

    make bench-suffix

The demo's base answers held-out questions under the adapters `json`, whose answers are calls as an
agent makes them, and `pirate`, whose sentences resemble each other. Each question comes once. In
`json again`, eight questions come again and again. All answers are kept, as with `samples on`.
`both`: the engine chooses between the two proposers. Every engine has learned for 50 steps of the
kind before, and the arms alternate step by step on the same requests, as in `bench_speculation`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.bench_speculation import Figure, Plan, friendly, shown
from benchmarks.report import MODELS, print_report
from benchmarks.speculation_arms import Job
from benchmarks.speculation_work import demo_work

PROPOSERS: Mapping[str, Sequence[str]] = {
    "ngram": ("ngram",),
    "suffix": ("suffix",),
    "both": ("ngram", "suffix"),
}
AGAIN = "json again"
NUM_QUESTIONS = 8
PLAN = Plan(work=("json", "pirate", AGAIN), proposers=tuple(PROPOSERS), batch_sizes=(1, 4))
SMOKE = Plan(
    work=("json", AGAIN),
    proposers=("both",),
    batch_sizes=(1,),
    least_jobs=1,
    rounds=1,
    learning_steps=1,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs")
    parser.add_argument("--models", type=Path, default=MODELS, help="ignored: the demo's base runs")
    options = parser.parse_args(arguments)
    plan = SMOKE if options.smoke else PLAN
    with tempfile.TemporaryDirectory() as folder:
        figures = list(shown(races_of(plan, Path(folder))))
    races = [race for figure in figures for race in figure.races]
    print_report(
        "suffix",
        [figure.row for figure in figures],
        near_ties=sum(race.num_near_ties for race in races),
        requests_answered_differently=sum(race.num_different for race in races),
    )
    return 0


def races_of(plan: Plan, directory: Path) -> Iterator[Figure]:
    """Each batch size has its own engines: the questions are the same."""
    work = recurring_work()
    for size in plan.batch_sizes:
        yield from friendly(replace(plan, batch_sizes=(size,)), PROPOSERS, work, directory, "cpu")


def recurring_work() -> dict[str, list[Job]]:
    """The demo's work, and the last questions again and again in random order."""
    work = demo_work()
    rng, questions = Random(0), work["json"][-NUM_QUESTIONS:]
    again = [
        job for _ in work["json"][::NUM_QUESTIONS] for job in rng.sample(questions, NUM_QUESTIONS)
    ]
    return {**work, AGAIN: again}


if __name__ == "__main__":
    sys.exit(main())
