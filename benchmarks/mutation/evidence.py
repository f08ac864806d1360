"""Tests the tests: random changes of the code, each of which a test must notice.

    make mutation-evidence [ARGS='--seed 1 --per-area 4 --only auth quotas --jobs 1']

Prints one JSON object. Exits with 1 if fewer than nine of ten are noticed. A surviving change may
change nothing that matters: who has looked at it names it in `--equivalent`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.mutation.areas import AREAS, matching

ROOT = Path(__file__).parents[2]
MIN_SHARE = 0.9
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
    with _copies(options.jobs) as copies, ThreadPoolExecutor(options.jobs) as threads:
        results = list(threads.map(lambda mutant: _try(mutant, copies), mutants))
    counted = [each for each in results if _name(each) not in options.equivalent]
    caught = sum(each["caught"] for each in counted)
    report = {"seed": options.seed, "tried": len(counted), "caught": caught, "mutants": results}
    print(json.dumps(report, indent=2))
    if caught < MIN_SHARE * len(counted):
        sys.exit(f"{caught} of {len(counted)} mutants were caught")


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


def _try(mutant: dict[str, Any], copies: SimpleQueue[Path]) -> dict[str, Any]:
    copy = copies.get()
    path = copy / mutant["path"]
    before = path.read_text()
    path.write_text(mutant.pop("source"))
    try:
        failure = _first_failure(copy, mutant)
    finally:
        path.write_text(before)
        copies.put(copy)
    result = mutant | {"caught": failure is not None, "by": failure}
    print(f"{_name(mutant)}: {failure or 'SURVIVED'}", file=sys.stderr, flush=True)
    return result


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
