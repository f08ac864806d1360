"""The ledger says what the engine has counted, to the token, whatever was killed on the way."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from loraplex.platform.database import Database
from loraplex.platform.models import Reservation, UsageDay, UsageRecord
from support.databases import RestartablePostgres
from support.fake_engine import PACE_FILE
from support.mortal_server import Counted, MortalServer, mortal_server
from support.server import Caller
from support.waiting import wait_for

NUM_KILLS = 20
NUM_WORKERS = 8
SEED = 20
PROMPT = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Callers:
    """Callers who ask without a pause, and write down what they were told."""

    server: MortalServer
    caller: Caller
    model: str
    usages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of whole answers."""
    num_seen: dict[str, int] = field(default_factory=dict)
    """Tokens that were received of each answer, whole or not."""
    codes: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def until_told(self, num_more: int) -> None:
        """Wait for so many more whole answers."""
        target = len(self.usages) + num_more
        while len(self.usages) < target:
            await asyncio.sleep(0.005)

    async def ask_on(self, number: int) -> None:
        draw = random.Random(f"{SEED}/{number}")
        headers = {"authorization": f"Bearer {self.caller.key}"}
        async with httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=30.0
        ) as client:
            while not self.is_over:
                num_before = len(self.num_seen)
                with suppress(httpx.TransportError):
                    await self._ask(client, draw)
                if len(self.num_seen) == num_before:
                    await asyncio.sleep(0.02)  # refused

    async def _ask(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        body = {
            "model": self.model,
            "prompt": PROMPT[: draw.randrange(1, len(PROMPT))],
            "max_tokens": draw.choice([5, 100, 300]),
            "n": draw.choice([1, 1, 1, 3]),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        patience = draw.choice([None, None, None, draw.randrange(1, 20)])
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                await answer.aread()
                self.codes[answer.json()["error"]["code"]] += 1
                return
            request_id = answer.headers["x-request-id"]
            self.num_seen[request_id] = 0
            events = 0
            async for line in answer.aiter_lines():
                self._take(request_id, line)
                events += bool(line)
                if patience is not None and events > patience:
                    return  # the caller goes away

    def _take(self, request_id: str, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.codes[event["error"]["code"]] += 1
            return
        if event.get("usage"):
            self.usages[request_id] = event["usage"]
        # Each letter is a token.
        self.num_seen[request_id] += sum(len(choice["text"]) for choice in event["choices"])


def ledger_of(server: MortalServer) -> dict[str, UsageRecord]:
    database = server.as_server().database
    with database.platform_transaction(read_only=True) as session:
        rows = session.scalars(select(UsageRecord)).all()
    database.close()
    return {row.request_id: row for row in rows}


def check_exact(server: MortalServer, callers: Callers) -> dict[str, UsageRecord]:
    """The ledger is what the engines have counted, and what callers were told; its rows."""
    rows = ledger_of(server)
    charged = {
        name: Counted(row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        for name, row in rows.items()
    }
    assert charged == server.counted
    for name, usage in callers.usages.items():
        told = (usage["prompt_tokens"], usage["completion_tokens"])
        assert told == (charged[name].prompt, charged[name].generated), name
        assert rows[name].finish_reason == "length"
    for name, num_seen in callers.num_seen.items():
        assert num_seen <= charged.get(name, Counted(0, 0, 0)).generated, f"{name}: seen unpaid"
    check_days(server, rows)
    return rows


def check_days(server: MortalServer, rows: dict[str, UsageRecord]) -> None:
    """The sums by day are sums of the rows, and no reservation is left."""
    sums: Counter[str] = Counter()
    for row in rows.values():
        day = row.created_at.astimezone(UTC).date()
        sums[f"{day} requests"] += 1
        sums[f"{day} prompt"] += row.prompt_tokens
        sums[f"{day} completion"] += row.completion_tokens
    database = server.as_server().database
    with database.platform_transaction(read_only=True) as session:
        days = session.scalars(select(UsageDay)).all()
        assert session.scalar(select(func.count()).select_from(Reservation)) == 0
    database.close()
    found: Counter[str] = Counter()
    for entry in days:
        found[f"{entry.day} requests"] += entry.num_requests
        found[f"{entry.day} prompt"] += entry.prompt_tokens
        found[f"{entry.day} completion"] += entry.completion_tokens
    assert found == sums


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    """A base on which most of a request's time is spent in the engine."""
    path = tmp_path / "base"
    shutil.copytree(tiny_base, path)
    (path / PACE_FILE).write_text("0.001")
    return path


async def kill_at_random(server: MortalServer, callers: Callers, draw: random.Random) -> str:
    """Kill the server or its engine; a server is started again, an engine by its server."""
    await callers.until_told(3)
    await asyncio.sleep(draw.uniform(0, 0.1))
    if draw.random() < 0.4:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return "server"
    engine = await asyncio.to_thread(wait_for, server.engine_pid)
    assert engine is not None
    with suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)
    return "engine"


def test_the_ledger_is_exact_after_twenty_kills(base: Path, tmp_path: Path) -> None:
    with mortal_server(base, tmp_path / "data") as mortal:
        check_kills(mortal, base.name)


def check_kills(mortal: MortalServer, model: str) -> None:
    mortal.start()
    callers = Callers(mortal, mortal.as_server().make_caller("acme"), model)
    draw = random.Random(SEED)

    async def scenario() -> Counter[str]:
        asking = [asyncio.create_task(callers.ask_on(number)) for number in range(NUM_WORKERS)]
        killed = Counter([await kill_at_random(mortal, callers, draw) for _ in range(NUM_KILLS)])
        await callers.until_told(3)
        callers.is_over = True
        await asyncio.gather(*asking)
        return killed

    killed = asyncio.run(scenario())
    assert min(killed["server"], killed["engine"]) >= 5
    mortal.stop()
    rows = check_exact(mortal, callers)
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
        callers = Callers(mortal, mortal.as_server().make_caller("acme"), base.name)

        async def scenario() -> None:
            asking = [asyncio.create_task(callers.ask_on(number)) for number in range(NUM_WORKERS)]
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
            callers.is_over = True
            await asyncio.gather(*asking)

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


def num_unsettled(server: MortalServer) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("loraplex_usage_unsettled "))
