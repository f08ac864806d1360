"""CPU time a token on its way through an agent and an API server, both ends together.

    make bench-fleet              ARGS="--streams 32 --steps 2000 --json FILE"

Two processes, TLS 1.3 over loopback with certificates on both ends. A step is one token of each
stream. On the agent it passes through the engine client's streams and the API server's session; on
the API server through the requests that were routed there, to their callers. Steps come as fast as
the API server takes them, each in a write of its own or 20 in one, or each 10 ms, as from an
engine, with pings. Waking each 10 ms is subtracted: an agent is woken by its engine. Both ends run
asyncio's loop or uvloop's, which the API server uses.

The bar is 10 us a token at 32 streams with uvloop and a write a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, cast

import uvloop
from benchmarks.rank_processes import rank_processes
from benchmarks.report import print_report

from loraplex.engine.errors import EngineError
from loraplex.engine.fleet.agent_session import AgentSession
from loraplex.engine.fleet.certificates import (
    AGENT_NAME,
    API_NAME,
    Certificates,
    agent_context,
    api_context,
)
from loraplex.engine.fleet.link import AgentLink, ApiLink, LinkServer, connect
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica import Replica
from loraplex.engine.fleet.routed_requests import RoutedRequests
from loraplex.engine.fleet.router import Router
from loraplex.engine.messages import (
    FromAgent,
    GenerationRequest,
    Hello,
    ReplicaState,
    StepEvents,
    TokensGenerated,
)
from loraplex.engine.process.quarantine import Quarantine
from loraplex.engine.process.request_stream import RequestEvent, RequestStream
from loraplex.engine.process.request_streams import RequestStreams
from loraplex.engine.sampling_params import SamplingParams
from support.fleet_certificates import Authority

HOST = "127.0.0.1"
HELLO = Hello("base", "runtime", "life")
MAX_SECONDS = 10e-6
STEP_SECONDS = 0.01
PACES = {"a write a step": 1, "a write of 20 steps": 20, "a step each 10 ms": 0}
"""The number of steps that are sent before the loop runs again, which writes them together; 0: the
steps are paced."""
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
BARRED = ("uvloop", "a write a step")

Send = Callable[[StepEvents], None]
REPLICA = "replica"


class Plan(NamedTuple):
    loop: str
    pace: str
    num_streams: int
    num_steps: int

    @property
    def num_tokens(self) -> int:
        return self.num_streams * self.num_steps


class SteppingEngine:
    """A stand-in for the agent's engine client: it has the streams and no engine process."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._streams = RequestStreams(
            max_requests=num_streams, note_end=lambda *_: None, abandon=lambda _: False
        )
        self.is_full = asyncio.Event()

    def submit(
        self, request: GenerationRequest, take: Callable[[RequestEvent], None]
    ) -> RequestStream:
        stream = RequestStream(request, abort=lambda _: None, take=take)
        self._streams.open(stream)
        if len(self._streams) == self._num_streams:
            self.is_full.set()
        return stream

    def step(self, step: StepEvents) -> None:
        self._streams.feed(step.tokens)


class ReadyReplica:
    """A stand-in for the agent's replica: it takes every request."""

    def __init__(self, engine: SteppingEngine) -> None:
        self.engine = engine
        self.ended = asyncio.Event()

    def check_accepts(self) -> None:
        pass

    def note_end(self, session: AgentSession) -> None:
        self.ended.set()


class Caller:
    """Sends the requests and counts the tokens of each."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._requests: RoutedRequests | None = None
        self._num_received = 0
        self.by_stream: Counter[str] = Counter()
        self.is_complete = asyncio.Event()

    def send_requests(self, link: ApiLink) -> None:
        router = Router(RendezvousOrder([REPLICA]))
        router.set_state(REPLICA, ReplicaState.READY)
        self._requests = RoutedRequests(
            router,
            Quarantine(time.monotonic),
            lambda _, message: link.send(message),
            has_room=lambda _: True,
            share_memory=lambda *_: False,
            max_requests=self._plan.num_streams,
        )
        for stream in range(self._plan.num_streams):
            request_id = stream_id(stream)
            take = partial(self._count, request_id)
            sampling = SamplingParams(max_tokens=self._plan.num_steps + 1)
            self._requests.submit(GenerationRequest(request_id, "acme", [5], sampling), take)

    def take(self, message: FromAgent) -> None:
        assert self._requests is not None
        assert isinstance(message, StepEvents)
        self._requests.deliver(REPLICA, message)

    def end(self, error: EngineError) -> None:
        raise error

    def _count(self, request_id: str, event: RequestEvent) -> None:
        assert isinstance(event, TokensGenerated)
        self.by_stream[request_id] += len(event.token_ids)
        self._num_received += 1
        if self._num_received >= self._plan.num_tokens:
            self.is_complete.set()


def stream_id(stream: int) -> str:
    return f"req-{stream:04d}-abcdef0123456789"


def make_step(plan: Plan, step: int) -> StepEvents:
    return StepEvents(
        tokens=[
            TokensGenerated(stream_id(stream), [(step * 7 + stream) % 32_000])
            for stream in range(plan.num_streams)
        ]
    )


async def send_steps(steps: Sequence[StepEvents], pace: str, send: Send) -> float:
    """CPU seconds of this process meanwhile."""
    steps_per_write = PACES[pace]
    begun = time.process_time()
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    for number, step in enumerate(steps, 1):
        send(step)
        if not steps_per_write:
            await asyncio.sleep(begun_at + number * STEP_SECONDS - loop.time())
        elif number % steps_per_write == 0:
            await asyncio.sleep(0)
    return time.process_time() - begun


async def run_agent(plan: Plan, certificates: Certificates, parent: Connection) -> None:
    engine = SteppingEngine(plan.num_streams)
    replica = ReadyReplica(engine)

    def accept(link: AgentLink) -> AgentSession:
        return AgentSession(cast(Replica, replica), link)

    context = agent_context(certificates)
    server = await LinkServer.start(HOST, 0, context=context, hello=HELLO, accept=accept)
    steps = [make_step(plan, number) for number in range(plan.num_steps)]
    woken = await send_steps(steps, plan.pace, lambda step: None)
    parent.send(server.port)
    await engine.is_full.wait()
    parent.send(await send_steps(steps, plan.pace, engine.step) - woken)
    await replica.ended.wait()
    await server.close()


def agent_process(plan: Plan, certificates: Certificates, parent: Connection) -> None:
    logging.disable(logging.WARNING)  # that the API server is lost is the end of the run
    with asyncio.Runner(loop_factory=LOOPS[plan.loop]) as runner:
        runner.run(run_agent(plan, certificates, parent))


async def receive_steps(plan: Plan, certificates: Certificates, port: int) -> float:
    """CPU seconds of this process from the first step to the last."""
    caller = Caller(plan)
    context = api_context(certificates)
    link = await connect(
        HOST, port, context=context, answer=lambda _: HELLO, accept=lambda _: caller
    )
    caller.send_requests(link)
    begun = time.process_time()
    await caller.is_complete.wait()
    spent = time.process_time() - begun
    assert set(caller.by_stream.values()) == {plan.num_steps}
    link.close()
    await link.wait_ended()
    return spent


def measure(plan: Plan, authority: Authority) -> dict[str, object]:
    ours, theirs = rank_processes().Pipe()
    agent = rank_processes().Process(
        target=agent_process, args=(plan, authority.issue(AGENT_NAME), theirs)
    )
    agent.start()
    port = ours.recv()
    with asyncio.Runner(loop_factory=LOOPS[plan.loop]) as runner:
        api_seconds = runner.run(receive_steps(plan, authority.issue(API_NAME), port))
    agent_seconds = ours.recv()
    agent.join()
    return {
        "loop": plan.loop,
        "steps": plan.pace,
        "agent_us": 1e6 * agent_seconds / plan.num_tokens,
        "api_us": 1e6 * api_seconds / plan.num_tokens,
        "us_per_token": 1e6 * (agent_seconds + api_seconds) / plan.num_tokens,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder) / "fleet")
        rows = [
            measure(Plan(loop, pace, options.streams, options.steps), authority)
            for loop in LOOPS
            for pace in PACES
        ]
    barred = next(row for row in rows if (row["loop"], row["steps"]) == BARRED)
    us_per_token = float(str(barred["us_per_token"]))
    facts = {"streams": options.streams, "steps": options.steps, "us_per_token": us_per_token}
    print_report("fleet", rows, **facts)
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0 if us_per_token <= 1e6 * MAX_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
