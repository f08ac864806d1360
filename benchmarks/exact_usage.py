"""Kills every kind of process repeatedly under load, and compares the ledger with the journal.

    make soak          or: PYTHONPATH=.src:tests python -m benchmarks.exact_usage [--kills 300]

The real engine serves a tiny model and an adapter, while other clients push adapters and send
schemas. The API server, its engine, its fetcher, examinations of uploads and the grammar checker
are killed by SIGKILL at random moments. What the server received of its engine is read from the
journal by independent code. Prints one JSON object; exits with 1 unless

- every row of the ledger equals the journal's count and the usage reported to the caller, to the
  token,
- no caller has seen a token that is not charged,
- no truncated answer looked complete,
- every push that was answered `ready` exists at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from loraplex.api.client.api_client import ApiClient
from loraplex.platform.models import UsageRecord
from support.beside_load import Pushes, checking, pushing
from support.exact_usage import (
    CHECKER,
    ENGINE,
    FETCHER,
    INTAKE,
    SERVER,
    Callers,
    check_exact,
    kill_under_load,
)
from support.models import make_adapter, make_tiny_llama
from support.mortal_server import mortal_server
from support.server import PRODUCT_ENGINE, Caller

VICTIMS = {SERVER: 0.2, ENGINE: 0.2, FETCHER: 0.2, INTAKE: 0.2, CHECKER: 0.2}


def least_tokens_of(text: str) -> int:
    """A piece of text of an answer is that of one token at least."""
    return min(len(text), 1)


def soak(num_kills: int, home: Path, seed: int) -> dict[str, object]:
    """What was killed and what was charged. Raises AssertionError if that is not what was used."""
    base = make_tiny_llama(home / "base")
    adapter = make_adapter(base, home / "adapter", seed=1)
    with mortal_server(base, home / "data", engine=PRODUCT_ENGINE) as mortal:
        mortal.start()
        caller = mortal.as_server().make_caller("acme")
        caller.push(adapter, "bot")
        callers = Callers(mortal, caller, ["bot", base.name], seed, least_tokens_of)
        with pushing(caller, adapter) as pushes, checking(caller, base.name) as checks:
            killed = kill_under_load(callers, num_kills, VICTIMS)
        lost = sorted(set(pushes.ready) - ready_adapters(caller))
        caller.close()
        mortal.stop()
        rows = check_exact(mortal, callers)
    assert lost == [], f"acknowledged pushes are gone: {lost}"
    return {
        "killed": killed,
        **figures_of(callers, rows.values(), pushes),
        "schemas": {"answered": checks.num_answered, "failed": checks.failed},
    }


def figures_of(
    callers: Callers, rows: Collection[UsageRecord], pushes: Pushes
) -> dict[str, object]:
    """What was asked, charged and refused."""
    return {
        "requests": len(rows),
        "aborted": sum(row.finish_reason == "aborted" for row in rows),
        "whole_answers": len(callers.usages),
        "truncated_successes": len(callers.truncated),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "completion_tokens": sum(row.completion_tokens for row in rows),
        "codes": callers.codes,
        "pushes": {"ready": len(pushes.ready), "failed": pushes.failed},
    }


def ready_adapters(caller: Caller) -> set[str]:
    """The names under which a version is ready."""
    client = ApiClient(caller.http, caller.url)
    return {row["name"] for row in client.pages("/adapters") if row["state"] == "ready"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = soak(arguments.kills, Path(home), arguments.seed)
        except AssertionError as exc:
            print(f"the ledger is not what was used: {exc}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
