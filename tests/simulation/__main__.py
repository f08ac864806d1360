"""Simulates the engine's scheduling: `python -m simulation --steps 1000000`.

`--only SEED` replays one seed and prints its event log. The last line is one line of JSON. The exit
status is not zero if an invariant was violated, a resource leaked, an event was too rare, or an
injected defect was not detected.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .planted import MISTAKES, search_all
from .runner import STEPS_PER_SEED, run_seeds
from .scenario import Scenario
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, metavar="SEED", help="replay this seed with its log")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--without-planted", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # failed loads and steps are what the nemesis is there for
    if args.only is not None:
        return _replay(args.only)
    return _run(args.steps, args.seed, args.processes, with_planted=not args.without_planted)


def _replay(seed: int) -> int:
    outcome = World(Scenario.draw(seed), log=print).run(STEPS_PER_SEED)
    print(outcome.log_hash, outcome.violation or "no violation")
    return 1 if outcome.violation else 0


def _run(num_steps: int, first_seed: int, processes: int | None, *, with_planted: bool) -> int:
    start = time.perf_counter()
    num_seeds = -(-num_steps // STEPS_PER_SEED)
    report = run_seeds(range(first_seed, first_seed + num_seeds), num_processes=processes)
    seconds = time.perf_counter() - start
    print(f"{report.num_steps} steps in {seconds:.1f} s: {report.num_steps / seconds:.0f} a second")
    for seed, violation in list(report.violations.items())[:20]:
        print(f"seed {seed}: {violation}")
    for name, count in report.rare.items():
        print(f"{name}: only {count}")
    if with_planted:
        report.planted = len(MISTAKES)
        for name, caught in search_all(num_processes=processes):
            report.caught += caught is not None
            print(f"planted {name}: {caught or 'NOT CAUGHT'}")
    print(report.as_json())
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
