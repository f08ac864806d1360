"""Tests the tests: random changes of the code, each of which a test must notice.

    make mutation-evidence [ARGS='--seed 1 --per-area 4 --only auth quotas --jobs 1']

First the tests that need no server run against each change, as in `make mutation-survey`. What
survives meets all tests of its area, in a clone. Prints one JSON object. Exits with 1 if fewer than
nine of ten are noticed. A surviving change may change nothing that matters: who has looked at it
names it in `--equivalent`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from benchmarks.mutation.areas import AREAS, matching
from benchmarks.mutation.forked_tests import ForkedTests, Mutant, Outcome

ROOT = Path(__file__).parents[2]
MIN_SHARE = 0.9
MAX_FORKED_SECONDS = 30.0
_STARTS_A_SERVER = ("support.server", "support.seeded", "support.console")
TIMEOUT_SECONDS = 900
_NO_TESTS_RAN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-area", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[*AREAS], choices=AREAS, metavar="AREA")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--python", required=True, help="the Python that has mutmut")
    parser.add_argument("--equivalent", nargs="*", default=[], metavar="PATH:LINE:MUTATOR")
    options = parser.parse_args()

    script = Path(__file__).with_name("mutants.py")
    drawn = subprocess.run(
        [options.python, script, "draw", str(options.seed), str(options.per_area), *options.only],
        stdout=subprocess.PIPE,
        check=True,
    )
    mutants = json.loads(drawn.stdout)
    found: dict[str, str | None] = dict.fromkeys(
        _caught_in_forks(msgspec.convert(mutants, list[Mutant]), options.only),
        "a test without a server",
    )
    left = [mutant for mutant in mutants if _name(mutant) not in found]
    with _copies(options.jobs) as copies, ThreadPoolExecutor(options.jobs) as threads:
        failures = threads.map(lambda mutant: _failure_in_clone(mutant, copies), left)
        found |= zip(map(_name, left), failures, strict=True)
    counted = [mutant for mutant in mutants if _name(mutant) not in options.equivalent]
    num_caught = sum(found[_name(mutant)] is not None for mutant in counted)
    report = {
        "seed": options.seed,
        "tried": len(counted),
        "caught": num_caught,
        "mutants": [_without_source(mutant) | {"by": found[_name(mutant)]} for mutant in mutants],
    }
    print(json.dumps(report, indent=2))
    if num_caught < MIN_SHARE * len(counted):
        sys.exit(f"{num_caught} of {len(counted)} mutants were caught")


def _caught_in_forks(mutants: Sequence[Mutant], areas: Sequence[str]) -> set[str]:
    """The names of those that a test without a server notices."""
    caught = set()

    def note(mutant: Mutant, outcome: Outcome) -> None:
        if outcome is Outcome.CAUGHT:
            caught.add(mutant.name)

    files = {path for area in areas for path in matching(ROOT, AREAS[area].tests)}
    quick = [
        path for path in files if not any(map(path.read_text().__contains__, _STARTS_A_SERVER))
    ]
    forked = ForkedTests(mutants, note, max_seconds=MAX_FORKED_SECONDS)
    options = ("-q", "--capture=sys", "-p", "no:cacheprovider", "-k", "not postgres")
    with redirect_stdout(sys.stderr):
        pytest.main([*options, *map(str, sorted(quick))], plugins=[forked])
    return caught


@contextmanager
def _copies(number: int) -> Iterator[SimpleQueue[Path]]:
    """Clones of the committed tree. The working tree never holds a mutant."""
    free: SimpleQueue[Path] = SimpleQueue()
    with TemporaryDirectory() as folder:
        for index in range(number):
            copy = Path(folder, str(index))
            subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
            free.put(copy)
        yield free


def _failure_in_clone(mutant: dict[str, Any], copies: SimpleQueue[Path]) -> str | None:
    copy = copies.get()
    path = copy / mutant["path"]
    before = path.read_text()
    path.write_text(mutant["source"])
    try:
        failure = _first_failure(copy, mutant)
    finally:
        path.write_text(before)
        copies.put(copy)
    print(f"{_name(mutant)}: {failure or 'SURVIVED'}", file=sys.stderr, flush=True)
    return failure


def _without_source(mutant: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mutant.items() if name != "source"}


def _name(mutant: dict[str, Any]) -> str:
    return f"{mutant['path']}:{mutant['line']}:{mutant['mutator']}"


def _first_failure(copy: Path, mutant: dict[str, Any]) -> str | None:
    """The first failed test, or None if all of the area pass.

    Those that name the module come first: most often they fail.
    """
    module = mutant["path"].removesuffix(".py").replace("/", ".")
    tests = list(matching(copy, AREAS[mutant["area"]].tests))
    direct = [path for path in tests if module in path.read_text()]
    for group in (direct, [path for path in tests if path not in direct]):
        if group and (failure := _fails(copy, group)):
            return failure
    return None


def _fails(copy: Path, tests: Sequence[Path]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, *(path.relative_to(copy) for path in tests)],
            cwd=copy,
            # Without the folders of this run: the copy's own code is tested.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if run.returncode in {0, _NO_TESTS_RAN}:
        return None
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:200] if failed else "pytest failed"


if __name__ == "__main__":
    main()
