"""Restarts PostgreSQL repeatedly under load, and compares the ledger with the engine.

    make soak     or: PYTHONPATH=.src:tests python -m benchmarks.restarted_database [--restarts 20]

The real engine serves a tiny model and an adapter, while other clients push adapters. The database
is alternately stopped and crashed, stays unavailable for up to two seconds while clients continue
to send requests, and returns. Prints one JSON object; exits with 1 unless

- the server runs through all of it, and exits with 0,
- requests are served while the database is unavailable,
- the ledger equals the journal's counts and the usage reported to callers, to the token, and no
  truncated answer looked complete (see `benchmarks.exact_usage`),
- every failure has a published code, and every push that was answered `ready` exists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.exact_usage import figures_of, least_tokens_of, ready_adapters

from loraplex.api.contract.error_codes import ERROR_CODES
from support.beside_load import pushing
from support.databases import RestartablePostgres, migrate
from support.exact_usage import Callers, check_exact, num_unsettled
from support.models import make_adapter, make_tiny_llama
from support.mortal_server import is_alive, mortal_server
from support.server import PRODUCT_ENGINE
from support.waiting import wait_for

NUM_ANSWERS_AWAY = 5
"""Whole answers between the database's end and its start, at least."""
NUM_ANSWERS_BETWEEN = 20
MAX_AWAY_SECONDS = 2.0
ROUND_SECONDS = 120.0
"""In which callers must have got that many answers."""


async def restart_under_load(
    postgres: RestartablePostgres, callers: Callers, num_restarts: int
) -> Counter[str]:
    """How often it ended in which way. Raises TimeoutError if callers get no answers."""
    draw = random.Random(callers.seed)
    ended: Counter[str] = Counter()
    async with callers.asking():
        for number in range(num_restarts):
            is_crash = number % 2 == 1
            async with asyncio.timeout(ROUND_SECONDS):
                await callers.until_told(NUM_ANSWERS_BETWEEN)
                await asyncio.to_thread(postgres.crash if is_crash else postgres.stop)
                await callers.until_told(NUM_ANSWERS_AWAY)
                await asyncio.sleep(draw.uniform(0, MAX_AWAY_SECONDS))
                await asyncio.to_thread(postgres.start)
            ended["crash" if is_crash else "stop"] += 1
            print(f"{number + 1} restarts, {len(callers.usages)} answers", file=sys.stderr)
        async with asyncio.timeout(ROUND_SECONDS):
            await callers.until_told(NUM_ANSWERS_BETWEEN)
    return ended


def soak(num_restarts: int, home: Path, seed: int) -> dict[str, object]:
    """What was charged. Raises AssertionError if that is not what was used."""
    base = make_tiny_llama(home / "base")
    adapter = make_adapter(base, home / "adapter", seed=1)
    postgres = RestartablePostgres()
    migrate(postgres.url)
    with mortal_server(base, home / "data", database=postgres.url, engine=PRODUCT_ENGINE) as mortal:
        mortal.start()
        caller = mortal.as_server().make_caller("acme")
        caller.push(adapter, "bot")
        callers = Callers(mortal, caller, ["bot", base.name], seed, least_tokens_of)
        with pushing(caller, adapter) as pushes:
            ended = asyncio.run(restart_under_load(postgres, callers, num_restarts))
        assert is_alive(mortal.pid), "the server has died"
        wait_for(lambda: num_unsettled(mortal) == 0, seconds=60)
        lost = sorted(set(pushes.ready) - ready_adapters(caller))
        caller.close()
        exit_status = mortal.stop()
        rows = check_exact(mortal, callers)
    assert lost == [], f"acknowledged pushes are gone: {lost}"
    assert exit_status == 0, f"the server's exit status is {exit_status}"
    assert not callers.broken, f"requests without an answer, or a whole one: {callers.broken}"
    unpublished = {*callers.codes, *pushes.failed} - set(ERROR_CODES)
    assert not unpublished, f"failures without a published code: {unpublished}"
    return {"restarted": ended, **figures_of(callers, rows.values(), pushes)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = soak(arguments.restarts, Path(home), arguments.seed)
        except pytest.skip.Exception as exc:
            print(f"left out: {exc}", file=sys.stderr)
            return 0
        except (AssertionError, TimeoutError) as exc:
            print(f"restarts of the database are not survived: {exc!r}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
