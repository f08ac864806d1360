"""CPU time of the API against another commit's: both servers alive, bursts of requests in turn.

    make bench-api-pairs ARGS='--before COMMIT'

A machine's speed changes from minute to minute, and single runs of `make bench-api` with it. Here
each round asks one server and then the other, in random order, and the ratio is taken within the
round. The server of the other commit runs from a worktree, in the environment of this one. Prints
the ratios with their standard errors, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NUM_AT_ONCE = 16
LONG = 401
"""Tokens of a stream."""


class Ratios(NamedTuple):
    """After / before, minus one."""

    mean: float
    standard_error: float
    of_sums: float


class Side:
    """A process that has one commit's server and its callers."""

    def __init__(self, tree: Path) -> None:
        folders = [tree / ".src", tree / "tests", tree]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def cpu_seconds(self, num_requests: int, num_tokens: int, *, is_stream: bool) -> float:
        """What the server took for so many requests."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_requests} {num_tokens} {int(is_stream)}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server of one side did not answer")
        return line


def serve() -> None:
    """Measure what the lines of the standard input ask for, with the modules of the path's tree."""
    import asyncio

    from benchmarks.bench_api import Load

    from support.fake_engine import PACE_FILE
    from support.models import make_tiny_llama
    from support.mortal_server import mortal_server

    with tempfile.TemporaryDirectory() as home:
        base = make_tiny_llama(Path(home) / "base")
        (base / PACE_FILE).write_text("0.002")
        with mortal_server(base, Path(home) / "data") as server:
            server.start()
            load = Load(server, server.as_server().make_caller("tenant"), base.name)
            clock = (~server.pid << 3) | 2  # the process's CPU time, see clock_getcpuclockid(3)
            print("ready", flush=True)
            for line in sys.stdin:
                num_requests, num_tokens, is_stream = map(int, line.split())
                start = time.clock_gettime(clock)
                asked = load.ask(
                    num_requests,
                    num_at_once=NUM_AT_ONCE,
                    num_tokens=num_tokens,
                    is_stream=bool(is_stream),
                )
                asyncio.run(asked)
                print(time.clock_gettime(clock) - start, flush=True)
            server.stop()


@contextmanager
def source_tree(given: str) -> Iterator[Path]:
    """The folder that is given, or a worktree of the commit."""
    if Path(given).is_dir():
        yield Path(given).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, given], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def compare(
    sides: Sequence[Side], rounds: int, num_requests: int, num_tokens: int, *, is_stream: bool
) -> Ratios:
    """`sides`: before and after."""
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for index in random.sample((0, 1), 2):
            took = sides[index].cpu_seconds(num_requests, num_tokens, is_stream=is_stream)
            seconds[index].append(took)
    before, after = seconds
    # Of the logarithms: the mean of the ratios themselves rises with their noise.
    logs = [math.log(late / early) for early, late in zip(before, after, strict=True)]
    return Ratios(
        mean=math.expm1(statistics.mean(logs)),
        standard_error=statistics.stdev(logs) / len(logs) ** 0.5,
        of_sums=sum(after) / sum(before) - 1,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", metavar="TREE", default="HEAD", help="a commit or a folder")
    parser.add_argument("--after", metavar="TREE", default=str(ROOT), help="the same")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--requests", type=int, default=64, help="of a burst")
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return
    with ExitStack() as stack:
        trees = [stack.enter_context(source_tree(it)) for it in (options.before, options.after)]
        sides = [Side(tree) for tree in trees]
        for side in sides:
            stack.callback(side.close)
        for num_tokens, is_stream in ((16, False), (LONG, True)):  # warm
            compare(sides, 2, options.requests, num_tokens, is_stream=is_stream)
        requests = compare(sides, options.rounds, options.requests, 16, is_stream=False)
        # Of a stream this long the request itself is a twentieth.
        rounds, num_streams = max(options.rounds // 4, 2), max(options.requests // 4, 1)
        streams = compare(sides, rounds, num_streams, LONG, is_stream=True)
    for what, ratios in (("a request", requests), (f"a stream of {LONG} tokens", streams)):
        print(
            f"{what}: {ratios.mean:+.1%} (± {ratios.standard_error:.1%}; "
            f"by sums {ratios.of_sums:+.1%})"
        )
    print(json.dumps({"request": requests._asdict(), "stream": streams._asdict()}))


if __name__ == "__main__":
    main()
