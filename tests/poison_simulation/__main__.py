"""Simulates outbreaks of poisonous adapters: `python -m poison_simulation --seeds 20`.

Prints the engines that each adapter ended, and the innocent adapters that were held out. The exit
status is not zero if an adapter ended more than two engines or an innocent one was held out, except
in the rows in which something else ends engines too.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from .adapters import EVERY_STEP, Poison
from .outcome import Outcome
from .planted import MAX_DEATHS, MISTAKES, is_caught
from .scenario import Scenario
from .world import World

POISONS = {
    "every step": EVERY_STEP,
    "from the 6th step on": Poison(first_step=5),
    "from the 26th step on": Poison(first_step=25),
    "30 % of steps": Poison(probability=0.3),
    "5 % of steps": Poison(probability=0.05),
}
NUM_KILLS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print("| poison | servers | adapters | ended: number of adapters | held out |")
    print("| --- | --- | --- | --- | --- |")
    holds = True
    for name, poison in POISONS.items():
        for num_servers, num_poisons in ((1, 1), (2, 1), (3, 1), (1, 3), (2, 3), (3, 3)):
            kind = Scenario(0, num_servers, num_poisons, poison)
            holds &= _row(name, kind, _runs(kind, range(args.seeds)))
    late = Scenario(0, has_late_server=True)
    holds &= _row("every step, a late server", late, _runs(late, range(args.seeds)))
    killed = Scenario(0, num_kills=NUM_KILLS)
    _row(f"every step, {NUM_KILLS} other ends", killed, _runs(killed, range(args.seeds)))
    for name in MISTAKES:
        caught = is_caught(name)
        holds &= caught
        print(f"planted {name}: {'noticed' if caught else 'NOT NOTICED'}")
    return 0 if holds else 1


def _runs(kind: Scenario, seeds: Iterable[int]) -> Iterator[Outcome]:
    for seed in seeds:
        yield World(replace(kind, seed=seed)).run()


def _row(name: str, kind: Scenario, outcomes: Iterable[Outcome]) -> bool:
    """Whether the goals hold."""
    ended: Counter[int] = Counter()
    num_held_out = 0
    for outcome in outcomes:
        ended.update(outcome.deaths.values())
        num_held_out += len(outcome.held_out)
    counts = ", ".join(f"{number}: {ended[number]}" for number in sorted(ended))
    servers = kind.num_servers
    print(f"| {name} | {servers} | {kind.num_poisons} | {counts} | {num_held_out} |", flush=True)
    return max(ended, default=0) <= MAX_DEATHS and not num_held_out


if __name__ == "__main__":
    sys.exit(main())
