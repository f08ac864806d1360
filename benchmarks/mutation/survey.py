"""Finds mistakes that no test notices: all small changes of some files, against the tests given.

    make mutation-survey ARGS='platform/keys/*.py --tests tests/platform/test_keys.py'

A changed function is run by the tests that call it, in a fork of the process that has collected
them: a fraction of a second instead of the twenty that `make mutation-evidence` takes. What runs in
a test's server, a process of its own, remains unchanged, so a change of the API can survive here
and be noticed there. Prints the changes that survived; some change nothing that matters.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from benchmarks.mutation.forked_tests import ForkedTests, Mutant, Outcome

MAX_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="+", help="files of the product")
    parser.add_argument("--tests", nargs="+", required=True, help="files, or options of pytest")
    parser.add_argument("--python", required=True, help="the Python that has mutmut")
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, help="of tests for one change"
    )
    options, more = parser.parse_known_args()

    script = Path(__file__).with_name("mutants.py")
    command = [options.python, script, "every", *options.paths]
    written = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    mutants = msgspec.json.decode(written, type=list[Mutant])
    outcomes: Counter[Outcome] = Counter()

    def note(mutant: Mutant, outcome: Outcome) -> None:
        outcomes[outcome] += 1
        if outcome in {Outcome.SURVIVED, Outcome.NOT_CALLED}:
            print(f"{outcome}: {mutant}", file=sys.__stdout__, flush=True)

    tests = ForkedTests(mutants, note, max_seconds=options.max_seconds)
    arguments = ["-q", "-p", "no:cacheprovider", "--capture=sys", *options.tests, *more]
    status = pytest.main(arguments, plugins=[tests])
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
