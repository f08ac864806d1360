"""Simulates handovers between replicas: `python -m roles_simulation --rounds 100000`.

The last line is one line of JSON. The exit status is not zero if an invariant was violated, an
event was too rare, or a planted mistake was not caught.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter

from .planted import MISTAKES, caught_by
from .runs import ROUNDS_PER_SEED, rare_of, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    num_violations = num_rounds = 0
    num_seeds = -(-args.rounds // ROUNDS_PER_SEED)
    for outcome in run_seeds(range(args.seed, args.seed + num_seeds)):
        counts += outcome.counts
        num_rounds += outcome.num_rounds
        if outcome.violation:
            num_violations += 1
            print(f"seed {outcome.seed}: {outcome.violation}")
    caught = {name: caught_by(name) for name in MISTAKES}
    for name, seen in caught.items():
        print(f"planted {name}: {seen or 'NOT CAUGHT'}")
    rare = rare_of(counts, num_rounds)
    for name in rare:
        print(f"{name}: only {counts[name]}")
    num_caught = sum(seen is not None for seen in caught.values())
    report = {
        "rounds": num_rounds,
        "seeds": num_seeds,
        "violations": num_violations,
        "planted": len(MISTAKES),
        "caught": num_caught,
        "counts": dict(sorted(counts.items())),
    }
    print(json.dumps(report))
    return 0 if not (num_violations or rare) and num_caught == len(MISTAKES) else 1


if __name__ == "__main__":
    sys.exit(main())
