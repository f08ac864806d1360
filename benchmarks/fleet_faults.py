"""Kills and drains the parts of a fleet under load, and compares the ledger with what was received.

    make fleet-evidence          or: PYTHONPATH=.src:tests python -m benchmarks.fleet_faults

Three agents with fake engines, which repeat a request's prompt, and two API servers on one
PostgreSQL database. Agents, engines and API servers are killed by SIGKILL, agents are stopped for
1.5 s and replicas are drained at random moments while sixteen callers ask. Prompts are random, so
text of another request is recognized: every request is a canary. Then the fleet gets adapters, of
which some are pinned and none is asked for, and engines, agents and API servers are killed one
after another under load. After each kill, and after each agent's next start, the time is measured
until every adapter is on the device of the first live replica of its order, and until the pinned
ones are pinned there and nowhere else. An agent is started again only after its adapters are on
other replicas, and its start ends when it listens.

Prints one JSON object; exits with 1 unless

- every row of the ledger equals the journals' count and the usage that callers were told,
- no caller has seen a token that is not charged,
- no truncated answer looked complete,
- no answer has text that is not of its prompt,
- adapters were where they shall be 15 s after each kill and start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loraplex.platform.database import Database
from support.adapter_homes import add_adapters
from support.databases import RestartablePostgres
from support.exact_usage import Callers, check_ledger
from support.fake_engine import PACE_FILE
from support.models import make_tiny_llama
from support.mortal_agent import mortal_agents
from support.mortal_fleet import MortalFleet
from support.mortal_server import mortal_server
from support.recovery import Recovery

NUM_AGENTS = 3
BASE_ID = "base"
"""Of the fake engines' base."""
MAX_RECOVERY_SECONDS = 15.0


def run(
    num_events: int, num_requests: int, num_rounds: int, home: Path, seed: int
) -> dict[str, object]:
    """What happened and what was charged. Raises AssertionError if it is not what it must be."""
    base = make_tiny_llama(home / "base")
    (base / PACE_FILE).write_text("0.001")
    postgres = RestartablePostgres()
    database = Database(postgres.url)
    database.upgrade()
    database.close()
    begun = time.monotonic()
    with ExitStack() as stack:
        agents, environment = stack.enter_context(mortal_agents(NUM_AGENTS, base, home))
        servers = [
            stack.enter_context(
                mortal_server(base, home / name, database=postgres.url, **environment)
            )
            for name in ("one", "two")
        ]
        servers[0].start()
        secret = servers[0].settings.data_dir / "secret"
        shutil.copy(secret, servers[1].settings.data_dir / "secret")
        servers[1].start()
        caller = servers[0].as_server().make_caller("acme")
        callers = [
            Callers(server, caller, [base.name], seed + place)
            for place, server in enumerate(servers)
        ]
        fleet = MortalFleet(agents, servers, callers)
        happened = fleet.under_load(num_events, seed=seed, until_requests=num_requests)
        homes = add_adapters(
            servers[0].as_server(), caller, Path(environment["LORAPLEX_STORE"]), base_id=BASE_ID
        )
        recoveries = fleet.recover_under_load(homes, num_rounds)
        caller.close()
        for server in servers:
            server.stop()
        rows = check_ledger(servers, callers)
    foreign = sum(each.num_foreign for each in callers)
    assert foreign == 0, f"{foreign} answers have text of others"
    late = [each for each in recoveries if max(each.pins, each.targets) > MAX_RECOVERY_SECONDS]
    assert late == [], f"adapters were not where they shall be in time: {late}"
    return {
        "events": happened,
        "requests": sum(len(each.num_seen) for each in callers),
        "choices_compared": sum(len(each.texts) for each in callers),
        "foreign": foreign,
        "rows": len(rows),
        "whole_answers": sum(len(each.usages) for each in callers),
        "truncated_successes": sum(len(each.truncated) for each in callers),
        "ledger_completion_tokens": sum(row.completion_tokens for row in rows.values()),
        "recoveries": len(recoveries),
        "max_recovery_seconds": _slowest(recoveries),
        "codes": sum((each.codes for each in callers), Counter()),
        "broken": sum((each.broken for each in callers), Counter()),
        "seconds": round(time.monotonic() - begun),
    }


def _slowest(recoveries: Sequence[Recovery]) -> dict[str, dict[str, float]]:
    """The longest times after each kind of event."""
    return {
        event: {
            "pins": max(each.pins for each in recoveries if each.event == event),
            "targets": max(each.targets for each in recoveries if each.event == event),
        }
        for event in dict.fromkeys(each.event for each in recoveries)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=4, help="of kills with a measured recovery")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = run(
                arguments.events, arguments.requests, arguments.rounds, Path(home), arguments.seed
            )
        except AssertionError as exc:
            print(f"not as it must be: {exc}", file=sys.stderr)
            return 1
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
