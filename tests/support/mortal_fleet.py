"""A fleet whose agents, engines and API servers are killed, paused and drained under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from sqlalchemy import select

from loraplex.platform.replicas import service as replicas
from loraplex.platform.replicas.models import Replica
from support.adapter_homes import AdapterHomes
from support.exact_usage import Callers
from support.mortal_agent import MortalAgent
from support.mortal_server import MortalServer
from support.recovery import Recovery, Watch
from support.waiting import wait_for

AGENT, ENGINE, SERVER, DRAIN, PAUSE = "agent", "engine", "server", "drain", "pause"
EVENTS: Mapping[str, float] = {AGENT: 0.3, ENGINE: 0.25, SERVER: 0.15, DRAIN: 0.15, PAUSE: 0.15}
PAUSE_SECONDS = 1.5
"""Longer than an API server waits for a silent agent."""
START = "agent's start"


@dataclass
class MortalFleet:
    """Agents, and API servers on one database, each with callers of its own."""

    agents: Sequence[MortalAgent]
    servers: Sequence[MortalServer]
    callers: Sequence[Callers]

    def under_load(self, num_events: int, *, seed: int, until_requests: int = 0) -> Counter[str]:
        """Let so many events happen while callers ask, and go on until there were so many requests;
        how often which happened. Everything serves in the end."""
        return asyncio.run(self._run(num_events, random.Random(seed), until_requests))

    def recover_under_load(self, homes: AdapterHomes, num_rounds: int) -> list[Recovery]:
        """Let each kind of part crash in each round while callers ask, and wait each time until
        adapters are where they shall be."""
        return asyncio.run(self._recover(homes, num_rounds))

    async def _recover(self, homes: AdapterHomes, num_rounds: int) -> list[Recovery]:
        async with AsyncExitStack() as stack:
            for callers in self.callers:
                await stack.enter_async_context(callers.asking())
            recoveries = []
            for number in range(num_rounds):
                found = await asyncio.to_thread(self._crash_each, homes, number)
                recoveries += found
        return recoveries

    def _crash_each(self, homes: AdapterHomes, number: int) -> list[Recovery]:
        agent = self.agents[number % len(self.agents)]
        watching, server = self.servers[:2]
        watch = Watch(homes, watching.url)
        watch.until_right("beginning")
        engine = agent.engine_pid()
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        found = [watch.until_right(ENGINE)]
        agent.kill()
        found.append(watch.until_right(AGENT, lost=[agent.address]))
        agent.start()
        wait_for(agent.is_listening, seconds=60)
        found.append(watch.until_right(START))
        server.kill()
        found.append(watch.until_right(SERVER))
        server.start()
        return found

    async def _run(self, num_events: int, draw: random.Random, until_requests: int) -> Counter[str]:
        happened: Counter[str] = Counter()
        async with AsyncExitStack() as stack:
            for callers in self.callers:
                await stack.enter_async_context(callers.asking())
            for _ in range(num_events):
                await asyncio.gather(*(callers.until_told(2) for callers in self.callers))
                await asyncio.sleep(draw.uniform(0, 0.1))
                (event,) = draw.choices(list(EVENTS), list(EVENTS.values()))
                await asyncio.to_thread(self._happen, event, draw)
                happened[event] += 1
            while sum(len(callers.num_seen) for callers in self.callers) < until_requests:
                await asyncio.sleep(0.1)
            await asyncio.gather(*(callers.until_told(2) for callers in self.callers))
        return happened

    def _happen(self, event: str, draw: random.Random) -> None:
        agent = draw.choice(self.agents)
        if event == AGENT:
            agent.kill()
            agent.start()
        elif event == ENGINE:
            pid = agent.engine_pid()
            with suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
        elif event == SERVER:
            server = draw.choice(self.servers)
            server.kill()
            server.start()
        elif event == PAUSE:
            os.kill(agent.pid, signal.SIGSTOP)
            time.sleep(PAUSE_SECONDS)
            os.kill(agent.pid, signal.SIGCONT)
        else:
            self._drain(agent)

    def _drain(self, agent: MortalAgent) -> None:
        """Drain the agent's replica, and let it serve again once it has no requests."""
        self._set_draining(agent, is_draining=True)
        with suppress(AssertionError):  # it may have been killed a moment ago
            wait_for(lambda: self._num_open(agent) == 0, seconds=5)
        self._set_draining(agent, is_draining=False)

    def _set_draining(self, agent: MortalAgent, *, is_draining: bool) -> None:
        database = self.servers[0].as_server().database
        with database.platform_transaction() as session:
            row = session.scalars(select(Replica).where(Replica.address == agent.address)).one()
            replicas.set_draining(session, row.id, is_draining=is_draining)
        database.close()

    def _num_open(self, agent: MortalAgent) -> int:
        database = self.servers[0].as_server().database
        with database.platform_transaction(read_only=True) as session:
            row = session.scalars(select(Replica).where(Replica.address == agent.address)).one()
            figures = row.figures or {}
        database.close()
        return int(figures.get("num_open", 0))
