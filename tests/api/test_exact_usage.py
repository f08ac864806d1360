"""The ledger equals what the servers received, to the token, whichever process was killed."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest

from loraplex.platform.database import Database
from support.databases import RestartablePostgres
from support.exact_usage import Callers, check_exact, kill_under_load, num_unsettled
from support.fake_engine import PACE_FILE
from support.mortal_server import mortal_server
from support.server import Caller
from support.waiting import wait_for

pytestmark = pytest.mark.slow

NUM_KILLS = 8
"""`make soak` kills three hundred times."""


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    """A base on which most of a request's time is spent in the engine."""
    path = tmp_path / "base"
    shutil.copytree(tiny_base, path)
    (path / PACE_FILE).write_text("0.001")
    return path


def test_the_ledger_is_exact_after_kills(base: Path, tmp_path: Path) -> None:
    with mortal_server(base, tmp_path / "data") as mortal:
        mortal.start()
        callers = Callers(mortal, mortal.as_server().make_caller("acme"), [base.name])
        killed = kill_under_load(callers, NUM_KILLS)
        mortal.stop()
        rows = check_exact(mortal, callers)
    assert min(killed["server"], killed["engine"]) >= 2
    finish_reasons = Counter(row.finish_reason for row in rows.values())
    assert finish_reasons["aborted"] >= NUM_KILLS, "the kills met requests that ran"
    assert len(callers.usages) > NUM_KILLS, "and others came to their end"
    assert callers.codes["engine_restarted"]


@pytest.fixture
def postgres() -> RestartablePostgres:
    server = RestartablePostgres()
    database = Database(server.url)
    database.upgrade()
    database.close()
    return server


def test_a_database_that_is_away_stops_no_answer_and_costs_no_row(
    postgres: RestartablePostgres, base: Path, tmp_path: Path
) -> None:
    with mortal_server(base, tmp_path / "data", database=postgres.url) as mortal:
        mortal.start()
        callers = Callers(mortal, mortal.as_server().make_caller("acme"), [base.name])

        async def scenario() -> None:
            async with callers.asking():
                await callers.until_told(10)
                for server_dies_too in (False, True):
                    await asyncio.to_thread(postgres.crash)
                    await callers.until_told(20)
                    check_management_is_refused(callers.caller)
                    if server_dies_too:
                        await asyncio.to_thread(mortal.kill)
                    await asyncio.to_thread(postgres.start)
                    if server_dies_too:
                        await asyncio.to_thread(mortal.start)
                    await callers.until_told(10)

        asyncio.run(scenario())
        wait_for(lambda: num_unsettled(mortal) == 0)
        callers.caller.close()
        mortal.stop()
        check_exact(mortal, callers)
    assert not callers.codes, "no caller has met the outage"


def check_management_is_refused(caller: Caller) -> None:
    answer = caller.http.get("/v1/usage")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "database_unavailable"
