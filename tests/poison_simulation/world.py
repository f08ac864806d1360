"""Servers, agents and traffic on one virtual clock."""

from __future__ import annotations

import asyncio
import ssl
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, count
from random import Random
from typing import cast
from unittest import mock

from loraplex.adapters.fetcher import BlockSource
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import AdapterQuarantined, EngineError, RequestQuarantined
from loraplex.engine.fleet import replica_link
from loraplex.engine.fleet.agent_session import AgentSession
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.lease import Lease
from loraplex.engine.fleet.link import AgentLink, ApiLink, Receiver
from loraplex.engine.fleet.member import Member
from loraplex.engine.fleet.replica import Replica
from loraplex.engine.messages import (
    BlockFound,
    FromAgent,
    GenerationRequest,
    Hello,
    RequestFinished,
    ToAgent,
)
from loraplex.engine.process.engine_process import EngineProcess
from loraplex.engine.process.request_stream import RequestEvent
from loraplex.engine.sampling_params import SamplingParams

from . import scenario as sizes
from .adapters import innocent, poisonous
from .network import End, Network
from .outcome import Outcome
from .process import MAX_BATCH, MAX_QUEUED, SimulatedProcess
from .scenario import Scenario
from .virtual_loop import VirtualLoop

QUARANTINES = (AdapterQuarantined.code, RequestQuarantined.code)
LEASE_SECONDS = 1e6
LOOK_SECONDS = 1.0
"""Between two looks of a server at the table of replicas."""


class World:
    """One outbreak. The servers are `Fleet`s, and the agents are `Replica`s with their `Engine`.
    Only the network, the engine processes and the time are simulated."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = Random(scenario.seed)
        self._network = Network(Random(scenario.seed + 1))
        self._poisons = {
            poisonous(number): scenario.poison for number in range(scenario.num_poisons)
        }
        self._innocents = [
            innocent(number, sizes.NUM_TENANTS) for number in range(sizes.NUM_ADAPTERS)
        ]
        self._weights = list(accumulate(1 / rank for rank in range(1, sizes.NUM_ADAPTERS + 1)))
        self._names = [f"r{number}" for number in range(sizes.NUM_REPLICAS)]
        self._replicas: dict[str, Replica] = {}
        self._processes: dict[str, SimulatedProcess] = {}
        self._fleets: list[Fleet] = []
        self._looking: list[asyncio.Task[None]] = []
        self._numbers = count()
        self._outcome = Outcome()

    def run(self) -> Outcome:
        loop = VirtualLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner, ExitStack() as patches:
            patches.enter_context(mock.patch("time.monotonic", loop.time))
            patches.enter_context(mock.patch.object(EngineProcess, "spawn", self._spawn))
            patches.enter_context(mock.patch.object(replica_link, "connect", self._connect))
            runner.run(self._live())
        return self._outcome

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        for name in self._names:
            self._replicas[name] = _replica(name)
        for key in self._innocents[: -sizes.NUM_NEW]:
            self._replicas[self._random.choice(self._names)].note_proven(key)
        await asyncio.gather(*(each.engine.start() for each in self._replicas.values()))
        for _ in range(self._scenario.num_servers):
            self._add_server()
        if self._scenario.has_late_server:
            loop.call_at(sizes.LATE_SECONDS, self._add_server)
        for _ in range(self._scenario.num_kills):
            loop.call_at(self._random.uniform(sizes.READY_SECONDS, sizes.END_SECONDS), self._kill)
        loop.call_at(sizes.READY_SECONDS, self._ask_for_innocent)
        for key in self._poisons:
            loop.call_at(sizes.OUTBREAK_SECONDS, self._break_out, key)
        await asyncio.sleep(sizes.END_SECONDS - loop.time())
        for task in self._looking:
            task.cancel()

    def _add_server(self) -> None:
        fleet = _fleet()
        self._looking.append(asyncio.create_task(self._look(fleet)))
        self._fleets.append(fleet)

    def _kill(self) -> None:
        self._processes[self._random.choice(self._names)].end_by_chance()

    async def _look(self, fleet: Fleet) -> None:
        while True:
            await fleet.set_members([_member(name) for name in self._names])
            await asyncio.sleep(LOOK_SECONDS)

    # --- what is simulated ------------------------------------------------------------------------

    async def _spawn(
        self, config: EngineConfig, *, prefix_key: bytes, command: Sequence[str]
    ) -> SimulatedProcess:
        seed = self._random.random()
        process = SimulatedProcess(self._poisons, Random(seed), self._note_death)
        self._processes[config.model] = process
        return process

    def _note_death(self, key: AdapterKey) -> None:
        self._outcome.deaths[key] += 1

    async def _connect(
        self,
        host: str,
        port: int,
        *,
        context: ssl.SSLContext,
        answer: Callable[[Hello], Hello],
        accept: Callable[[ApiLink], Receiver[FromAgent]],
    ) -> ApiLink:
        ours = End[ToAgent, FromAgent](self._network.delay)
        theirs = End[FromAgent, ToAgent](self._network.delay)
        ours.peer, theirs.peer = theirs, ours
        answer(Hello("base", "runtime", host))
        ours.receiver = accept(cast(ApiLink, ours))
        replica = self._replicas[host]
        session = AgentSession(replica, cast(AgentLink, theirs))
        theirs.receiver = session
        replica.welcome(session)
        return cast(ApiLink, ours)

    # --- traffic ----------------------------------------------------------------------------------

    def _ask_for_innocent(self) -> None:
        drawn = self._random.random() * self._weights[-1]
        key = self._innocents[bisect_left(self._weights, drawn)]
        self._ask(self._random.choice(self._fleets), key)
        self._plan(sizes.REQUESTS_PER_SECOND, self._ask_for_innocent)

    def _break_out(self, key: AdapterKey) -> None:
        for fleet in self._fleets:
            for _ in range(sizes.BURST_SIZE):
                self._ask(fleet, key)
        self._ask_for_poison(key)

    def _ask_for_poison(self, key: AdapterKey) -> None:
        self._ask(self._random.choice(self._fleets), key)
        self._plan(sizes.POISON_PER_SECOND, lambda: self._ask_for_poison(key))

    def _plan(self, per_second: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self._random.expovariate(per_second), call)

    def _ask(self, fleet: Fleet, key: AdapterKey) -> None:
        number = next(self._numbers)
        num_tokens = 1 + int(self._random.expovariate(1 / sizes.MEAN_TOKENS))
        request = GenerationRequest(
            f"q{number}", key.tenant_id, [number], SamplingParams(max_tokens=num_tokens), key
        )
        try:
            fleet.submit(request, lambda event: self._note(key, event))
        except EngineError as error:
            self._note_end(key, error.code)

    def _note(self, key: AdapterKey, event: RequestEvent) -> None:
        if isinstance(event, RequestFinished):
            self._note_end(key, event.error.code if event.error else None)

    def _note_end(self, key: AdapterKey, code: str | None) -> None:
        if key in self._poisons:
            self._outcome.num_refusals += code in QUARANTINES
        elif code in QUARANTINES:
            self._outcome.held_out.add(key)
        else:
            self._outcome.num_answers += code is None


def _fleet() -> Fleet:
    async def locate(key: AdapterKey) -> BlockFound:
        raise AssertionError("simulated processes load without asking")

    return Fleet(context=cast(ssl.SSLContext, None), locate=locate, max_requests=10_000)


def _replica(name: str) -> Replica:
    lease = Lease(asyncio.get_running_loop().time)
    lease.renew(lease.ask(), LEASE_SECONDS)
    config = EngineConfig(model=name, max_num_seqs=MAX_BATCH, max_queued=MAX_QUEUED)
    return Replica(config, fetcher=cast(BlockSource, _Fetcher()), lease=lease)


class _Fetcher:
    def note_read(self, key: AdapterKey) -> None:
        pass


def _member(name: str) -> Member:
    return Member(
        id=name,
        host=name,
        port=1,
        is_draining=False,
        incarnation=None,
        is_live=True,
        has_expired=False,
    )
