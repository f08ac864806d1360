"""Kills the engine repeatedly under load, stops the server under load, and counts what is lost.

    make soak          or: PYTHONPATH=.src:tests python -m benchmarks.soak [--kills 50]

Every round starts a server with a tiny model, kills its engine four times while requests run (a
fifth crash within a minute would be a crash loop, which correctly stops the engine) and ends with
SIGTERM. Prints one JSON object; exits with 1 if a request ended neither completely nor with a code,
if a process remained, or if a server did not exit with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from support.load import Load
from support.models import make_adapter, make_tiny_llama
from support.server import ServerUnderTest, serving

KILLS_PER_ROUND = 4
NUM_WORKERS = 12
NUM_ANSWERS_BETWEEN = 20
READY_SECONDS = 120.0


@dataclass
class Figures:
    """What a soak has seen."""

    num_kills: int = 0
    num_answered: int = 0
    num_violations: int = 0
    num_orphans: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)
    ready_again_seconds: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.num_violations or self.num_orphans) and set(self.exit_codes) <= {0}

    def summary(self) -> dict[str, object]:
        times = self.ready_again_seconds
        return {
            **vars(self),
            "ready_again_seconds": {"median": statistics.median(times), "max": max(times)},
        }


async def run_round(server: ServerUnderTest, load: Load, num_kills: int, figures: Figures) -> None:
    pids = []
    async with load.running(NUM_WORKERS):
        for _ in range(num_kills):
            await load.until_answered(NUM_ANSWERS_BETWEEN)
            pids.append(server.engine_pid())
            os.kill(pids[-1], signal.SIGKILL)
            figures.ready_again_seconds.append(await ready_again(server))
        await load.until_answered(NUM_ANSWERS_BETWEEN)
        pids.append(server.engine_pid())
        load.may_refuse_connections = True
        server.process.send_signal(signal.SIGTERM)
        figures.exit_codes[await asyncio.to_thread(server.process.wait, 60)] += 1
    figures.num_kills += num_kills
    figures.num_orphans += sum(Path(f"/proc/{pid}").exists() for pid in pids)
    figures.num_answered += load.num_answered
    figures.codes += load.codes
    figures.num_violations += len(load.violations)
    for violation in load.violations:
        print(violation, file=sys.stderr)


async def ready_again(server: ServerUnderTest) -> float:
    """Seconds from a kill until the server is ready with another engine."""
    begun_at = time.monotonic()
    async with httpx.AsyncClient(base_url=server.url) as client, asyncio.timeout(READY_SECONDS):
        for is_awaited in (False, True):  # first the server must notice
            while (await client.get("/ready")).is_success is not is_awaited:
                await asyncio.sleep(0.02)
    return time.monotonic() - begun_at


def soak(num_kills: int, home: Path) -> Figures:
    figures = Figures()
    base = make_tiny_llama(home / "base")
    adapter = make_adapter(base, home / "adapter", seed=1)
    while figures.num_kills < num_kills and figures.is_good:
        with serving(base, home / f"round-{figures.num_kills}") as server:
            caller = server.make_caller("acme")
            caller.push(adapter, "bot", aliases=["prod"])
            load = Load(server.url, caller.key, ["bot", base.name])
            left = min(KILLS_PER_ROUND, num_kills - figures.num_kills)
            asyncio.run(run_round(server, load, left, figures))
        print(f"{figures.num_kills} kills, {figures.num_answered} answers", file=sys.stderr)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        figures = soak(arguments.kills, Path(home))
    print(json.dumps(figures.summary()))
    return 0 if figures.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
