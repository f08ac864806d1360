"""Nothing is lost, doubled or mixed up when parts of a fleet are killed under load, and adapters
come back to where they shall be."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from loraplex.platform.database import Database
from support.adapter_homes import add_adapters
from support.databases import RestartablePostgres
from support.exact_usage import Callers, check_ledger
from support.fake_engine import PACE_FILE
from support.mortal_agent import mortal_agents
from support.mortal_fleet import AGENT, ENGINE, SERVER, START, MortalFleet
from support.mortal_server import mortal_server

pytestmark = pytest.mark.slow

NUM_EVENTS = 8
"""`make fleet-evidence` lets sixty happen."""


def test_the_ledger_is_exact_no_answer_is_anothers_and_adapters_come_back(
    tiny_base: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    (base / PACE_FILE).write_text("0.001")
    postgres = RestartablePostgres()
    database = Database(postgres.url)
    database.upgrade()
    database.close()
    with ExitStack() as stack:
        agents, environment = stack.enter_context(mortal_agents(2, base, tmp_path))
        servers = [
            stack.enter_context(
                mortal_server(base, tmp_path / name, database=postgres.url, **environment)
            )
            for name in ("one", "two")
        ]
        servers[0].start()
        secret = servers[0].settings.data_dir / "secret"  # all servers of a fleet have the same
        shutil.copy(secret, servers[1].settings.data_dir / "secret")
        servers[1].start()
        caller = servers[0].as_server().make_caller("acme")
        callers = [
            Callers(server, caller, [base.name], seed) for seed, server in enumerate(servers)
        ]
        fleet = MortalFleet(agents, servers, callers)
        happened = fleet.under_load(NUM_EVENTS, seed=3)
        homes = add_adapters(
            servers[0].as_server(), caller, Path(environment["LORAPLEX_STORE"]), base_id="base"
        )
        recoveries = fleet.recover_under_load(homes, num_rounds=1)
        caller.close()
        for server in servers:
            server.stop()
        check_ledger(servers, callers)
    assert sum(happened.values()) == NUM_EVENTS
    assert [each.event for each in recoveries] == [ENGINE, AGENT, START, SERVER]
    assert all(each.num_foreign == 0 for each in callers)
    assert all(len(each.usages) > NUM_EVENTS for each in callers)
