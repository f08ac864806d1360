"""Compares routing policies on simulated fleets: `python -m fleet_simulation --json FILE`.

40 replicas with 4,000 adapters, then 100 with 10,000, in the same seeds. The exit status is not
zero if our router breaks a rule (checks.py) or a planted mistake is not caught.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .planted import MISTAKES, caught_by
from .runs import all_runs, rows_of
from .scenario import Size
from .table import table

SMALLER = Size(num_replicas=40, num_adapters=4_000, warm_seconds=5, measured_seconds=15)
LARGER = Size(num_replicas=100, num_adapters=10_000, warm_seconds=3, measured_seconds=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=2, help="1 is what the bounds are from")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    runs = all_runs(SMALLER, seeds) + all_runs(LARGER, seeds)
    rows = list(rows_of(runs, args.processes))
    print("\n".join(table(rows)))
    if args.json:
        args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    caught = {name: caught_by(name) for name in MISTAKES}
    for name, rule in caught.items():
        print(f"planted {name}: {rule or 'NOT CAUGHT'}")
    return 0 if all(caught.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
