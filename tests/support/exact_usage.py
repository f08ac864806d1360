"""Clients of servers that are killed, and a comparison of the ledger with the journal."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

import httpx
from sqlalchemy import func, select

from loraplex.platform.models import Reservation, UsageDay, UsageRecord
from support.mortal_server import Counted, MortalServer
from support.processes import descendants
from support.server import Caller
from support.waiting import wait_for

NUM_WORKERS = 8
FIRST_PAUSE_SECONDS = 0.02
"""After a refusal, before the next request; then ever longer."""
MAX_PAUSE_SECONDS = 0.5
PROMPT = "abcdefghijklmnopqrstuvwxyz"
SERVER, ENGINE, FETCHER, INTAKE, CHECKER = "server", "engine", "fetcher", "intake", "checker"
MODULES = {
    FETCHER: "loraplex.adapters.fetcher_process",
    INTAKE: "loraplex.adapters.intake",
    CHECKER: "loraplex.engine.grammars.check_process",
}
SERVER_AND_ENGINE: Mapping[str, float] = {SERVER: 0.4, ENGINE: 0.6}


@dataclass
class Callers:
    """Callers who ask without a pause, and write down what they were told."""

    server: MortalServer
    caller: Caller
    models: Sequence[str]
    seed: int = 20
    least_tokens_of: Callable[[str], int] = len
    """How many tokens a piece of text has at least; of the fake engine's each letter is one."""
    usages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of whole answers."""
    num_seen: dict[str, int] = field(default_factory=dict)
    """Tokens that were received of each answer, whole or not."""
    num_expected: dict[str, int] = field(default_factory=dict)
    """Tokens of each answer, were it whole: all are generated to the end."""
    prompts: dict[str, str] = field(default_factory=dict)
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    """What was received of each choice; the fake engine repeats the prompt."""
    truncated: list[str] = field(default_factory=list)
    """Answers that ended like whole ones and were not."""
    codes: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    """What became of requests that got no answer, or not to its end; no server that is alive
    leaves any."""
    is_over: bool = False

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """They ask until the block is left; what runs then is waited for."""
        self.is_over = False
        asking = [asyncio.create_task(self.ask_on(number)) for number in range(NUM_WORKERS)]
        try:
            yield
        finally:
            self.is_over = True
            await asyncio.gather(*asking)

    async def until_told(self, num_more: int) -> None:
        """Wait for so many more whole answers."""
        target = len(self.usages) + num_more
        while len(self.usages) < target:
            await asyncio.sleep(0.005)

    async def ask_on(self, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        headers = {"authorization": f"Bearer {self.caller.key}"}
        async with httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=30.0
        ) as client:
            pause = FIRST_PAUSE_SECONDS
            while not self.is_over:
                try:
                    if await self._ask(client, draw):
                        pause = FIRST_PAUSE_SECONDS
                        continue
                except httpx.TransportError as exc:
                    self.broken[type(exc).__name__] += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _ask(self, client: httpx.AsyncClient, draw: random.Random) -> bool:
        """Ask once; whether the request was taken."""
        body: dict[str, Any] = {
            "model": draw.choice(self.models),
            "prompt": self._prompt(draw),
            "max_tokens": draw.choice([5, 100, 300]),
            "n": draw.choice([1, 1, 1, 3]),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        patience = draw.choice([None, None, None, draw.randrange(1, 20)])
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                await answer.aread()
                self.codes[answer.json()["error"]["code"]] += 1
                return False
            request_id = answer.headers["x-request-id"]
            self.num_seen[request_id] = 0
            self.prompts[request_id] = body["prompt"]
            self.num_expected[request_id] = body["max_tokens"] * body["n"]
            events = 0
            async for line in answer.aiter_lines():
                self._take(request_id, line)
                events += bool(line)
                if patience is not None and events > patience:
                    break  # the caller goes away
        return True

    def _take(self, request_id: str, line: str) -> None:
        if line == "data: [DONE]" and not self._is_whole(request_id):
            self.truncated.append(request_id)
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.codes[event["error"]["code"]] += 1
            return
        if event.get("usage"):
            self.usages[request_id] = event["usage"]
        for choice in event["choices"]:
            place = request_id, choice["index"]
            self.texts[place] = self.texts.get(place, "") + choice["text"]
        texts = [choice["text"] for choice in event["choices"]]
        self.num_seen[request_id] += sum(map(self.least_tokens_of, texts))

    def _prompt(self, draw: random.Random) -> str:
        """As good as unique if it is long, so that another's tokens are recognized."""
        return "".join(draw.choices(PROMPT, k=draw.randrange(1, len(PROMPT))))

    @property
    def num_foreign(self) -> int:
        """How many choices had text that is not of their prompt."""
        return sum(
            not (self.prompts[request_id] * len(text)).startswith(text)
            for (request_id, _), text in self.texts.items()
        )

    def _is_whole(self, request_id: str) -> bool:
        told = self.usages.get(request_id, {}).get("completion_tokens")
        return told == self.num_expected[request_id]


def ledger_of(server: MortalServer) -> dict[str, UsageRecord]:
    database = server.as_server().database
    with database.platform_transaction(read_only=True) as session:
        rows = session.scalars(select(UsageRecord)).all()
    database.close()
    return {row.request_id: row for row in rows}


def check_exact(server: MortalServer, callers: Callers) -> dict[str, UsageRecord]:
    """The ledger is what the servers have counted, and what callers were told; its rows."""
    return check_ledger([server], [callers])


def check_ledger(
    servers: Sequence[MortalServer], all_callers: Sequence[Callers]
) -> dict[str, UsageRecord]:
    """The same for several servers on one database."""
    rows = ledger_of(servers[0])
    charged = {
        name: Counted(row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        for name, row in rows.items()
    }
    assert charged == {name: count for each in servers for name, count in each.counted.items()}
    for callers in all_callers:
        assert callers.truncated == []
        for name, usage in callers.usages.items():
            told = (usage["prompt_tokens"], usage["completion_tokens"])
            assert told == (charged[name].prompt, charged[name].generated), name
            assert rows[name].finish_reason == "length"
        for name, num_seen in callers.num_seen.items():
            assert num_seen <= charged.get(name, Counted(0, 0, 0)).generated, f"{name}: seen unpaid"
    check_days(servers[0], rows)
    return rows


def num_unsettled(server: MortalServer) -> float:
    """How many outcomes wait for the database."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("loraplex_usage_unsettled "))


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


async def kill_at_random(
    server: MortalServer, callers: Callers, draw: random.Random, victims: Mapping[str, float]
) -> str:
    """Kill one of the victims, which have weights; what is killed is started again by its owner."""
    await callers.until_told(3)
    await asyncio.sleep(draw.uniform(0, 0.1))
    (victim,) = draw.choices(list(victims), list(victims.values()))
    if victim == SERVER:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return victim
    pid = await asyncio.to_thread(wait_for, lambda: find_process(server, victim), seconds=60)
    assert pid is not None
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return victim


def find_process(server: MortalServer, victim: str) -> int | None:
    """A process of the server by its role; None while there is none."""
    if victim == ENGINE:
        return server.engine_pid()
    module = MODULES[victim]
    found = (pid for pid, line in descendants(server.pid).items() if module in line.split("\0"))
    return next(found, None)


def kill_under_load(
    callers: Callers, num_kills: int, victims: Mapping[str, float] = SERVER_AND_ENGINE
) -> Counter[str]:
    """Kill so many times, while callers ask; how often which. The server serves in the end."""
    draw = random.Random(callers.seed)

    async def scenario() -> Counter[str]:
        killed: Counter[str] = Counter()
        async with callers.asking():
            for _ in range(num_kills):
                killed[await kill_at_random(callers.server, callers, draw, victims)] += 1
            await callers.until_told(3)
        return killed

    return asyncio.run(scenario())
