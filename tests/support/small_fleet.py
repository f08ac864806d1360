"""A fleet in one event loop: agents around fake engines, and a table of replicas in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from loraplex.adapters.errors import ObjectNotFound
from loraplex.adapters.fetcher import FetchedBlock
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.config import EngineConfig
from loraplex.engine.fleet.agent import Agent, AgentEnd
from loraplex.engine.fleet.certificates import AGENT_NAME, API_NAME, agent_context, api_context
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.lease import Lease
from loraplex.engine.fleet.member import Member
from loraplex.engine.fleet.replica import Replica
from loraplex.engine.messages import BlockFound, ReplicaRole, ReplicaState
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.engine_process import ENGINE_COMMAND
from support.fake_client import FAKE_ENGINE
from support.fleet_certificates import Authority

HOST = "127.0.0.1"
LEASE_SECONDS = 60.0
LOOK_SECONDS = 0.02
TIMEOUT_SECONDS = 60


class FakeFetcher:
    """Has every block at once, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.fetched: list[AdapterKey] = []
        self.forgotten: list[AdapterKey] = []

    def fetch(self, key: AdapterKey, *, sha256: str, size_bytes: int) -> Future[FetchedBlock]:
        assert (sha256, size_bytes) == (key.digest, len(key.digest))
        self.fetched.append(key)
        done: Future[FetchedBlock] = Future()
        done.set_result(FetchedBlock(Path("/blocks") / key.digest, Tier.STORE, 0.0))
        return done

    def note_read(self, key: AdapterKey) -> None:
        pass

    def forget(self, key: AdapterKey) -> None:
        self.forgotten.append(key)


class RunningAgent:
    """An agent on a port of its own, which it keeps when it is started again."""

    def __init__(
        self,
        name: str,
        home: Path,
        authority: Authority,
        *,
        role: ReplicaRole = ReplicaRole.BOTH,
        config: EngineConfig | None = None,
    ) -> None:
        """`config`: of a real engine; None: a fake one."""
        self.name = name
        self._role = role
        self._command = ENGINE_COMMAND if config else FAKE_ENGINE
        self._config = config or EngineConfig(model=str(home), max_num_seqs=8)
        self.home = home
        home.mkdir(exist_ok=True)
        self.port = 0
        self.now = time.monotonic
        self._context = agent_context(authority.issue(AGENT_NAME))
        self._running: asyncio.Task[AgentEnd] | None = None

    async def start(self) -> None:
        """Start it, with a new incarnation."""
        self.fetcher = FakeFetcher()
        self.replica = Replica(
            self._config,
            fetcher=self.fetcher,
            command=self._command,
            lease=Lease(lambda: self.now()),
            role=self._role,
        )
        self.agent = Agent(self.replica, context=self._context)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(
            self.agent.run(HOST, self.port, on_listening=listening.set_result)
        )
        while not (listening.done() or self._running.done()):
            await asyncio.sleep(0.005)
        assert listening.done(), self._running
        self.port = listening.result()

    async def wait_end(self) -> AgentEnd:
        assert self._running is not None
        return await self._running

    async def stop(self) -> AgentEnd:
        self.agent.stop(drain_seconds=0.0)
        return await self.wait_end()

    @property
    def engine(self) -> EngineClient:
        assert isinstance(self.replica.engine, EngineClient)
        return self.replica.engine


@dataclass
class _Row:
    agent: RunningAgent
    incarnation: str | None = None
    seen_at: float = float("-inf")
    is_draining: bool = False
    state: ReplicaState | None = None


@dataclass
class Table:
    """The replicas as a database would have them."""

    rows: dict[str, _Row] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic
    is_available: bool = True

    def look(self, fleet: Fleet) -> list[Member]:
        for asked in fleet.asked_renewals():
            row = self.rows.get(asked.id)
            refusal = None
            if row is None:
                refusal = "replica_removed"
            elif row.incarnation == asked.incarnation and self._has_expired(row):
                refusal = "replica_fenced"
            else:
                row.incarnation, row.state, row.seen_at = asked.incarnation, asked.state, self.now()
            fleet.answer_renewal(asked, refusal, LEASE_SECONDS)
        return [self._as_member(name, row) for name, row in self.rows.items()]

    def _has_expired(self, row: _Row) -> bool:
        return row.seen_at + LEASE_SECONDS <= self.now()

    def _as_member(self, name: str, row: _Row) -> Member:
        return Member(
            id=name,
            host=HOST,
            port=row.agent.port,
            is_draining=row.is_draining,
            incarnation=row.incarnation,
            is_live=self.now() - row.seen_at < 10 and row.state is ReplicaState.READY,
            has_expired=self._has_expired(row),
        )


class SmallFleet:
    """Agents, and API servers that read one table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = Authority(folder / "fleet")
        self._api_context = api_context(self._authority.issue(API_NAME))
        self.table = Table()
        self.agents: dict[str, RunningAgent] = {}
        self.unknown: set[AdapterKey] = set()
        """What no version has any more."""
        self._fleets: list[tuple[Fleet, asyncio.Task[None]]] = []

    async def add_agent(
        self,
        name: str,
        role: ReplicaRole = ReplicaRole.BOTH,
        config: EngineConfig | None = None,
    ) -> RunningAgent:
        """Start an agent that API servers find in the table; `config` as of `RunningAgent`."""
        agent = self.agents[name] = RunningAgent(
            name, self._folder / name, self._authority, role=role, config=config
        )
        await agent.start()
        self.table.rows[name] = _Row(agent)
        return agent

    def make_fleet(self) -> Fleet:
        """An API server's, without members."""
        return Fleet(context=self._api_context, locate=self._locate, max_requests=1000)

    def add_api_server(self, ports: Mapping[str, int] = MappingProxyType({})) -> Fleet:
        """One that reads the table. `ports`: of proxies before agents, by the agents' names."""
        fleet = self.make_fleet()
        self._fleets.append((fleet, asyncio.create_task(self._look(fleet, ports))))
        return fleet

    async def close(self) -> None:
        for fleet, looking in self._fleets:
            looking.cancel()
            await asyncio.wait([looking])
            await fleet.stop()
        for agent in self.agents.values():
            with suppress(Exception):
                await agent.stop()

    async def _look(self, fleet: Fleet, ports: Mapping[str, int]) -> None:
        while True:
            if self.table.is_available:
                members = self.table.look(fleet)
                await fleet.set_members(
                    [replace(each, port=ports.get(each.id, each.port)) for each in members]
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def _locate(self, key: AdapterKey) -> BlockFound:
        if key in self.unknown:
            raise ObjectNotFound("no version has this content any more")
        return BlockFound(key, key.digest, len(key.digest))


@asynccontextmanager
async def running_fleet(folder: Path, *names: str) -> AsyncIterator[tuple[SmallFleet, Fleet]]:
    """Agents of these names, and an API server for which all of them are ready."""
    fleet = SmallFleet(folder)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        try:
            await asyncio.gather(*(fleet.add_agent(name) for name in names))
            server = fleet.add_api_server()
            await server.start()
            while not all(link.state is ReplicaState.READY for link in server.links):
                await asyncio.sleep(0.005)
            yield fleet, server
        finally:
            await fleet.close()
