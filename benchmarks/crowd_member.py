"""Clients of `benchmarks.crowd` in one process: `python -m benchmarks.crowd_member PLAN`.

`PLAN` is a JSON object with the fields of `Plan`. The process prints a line when all its clients
are connected. Streams end by themselves; the others stay until the standard input ends. Then it
prints a line of JSON with the clients' results.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import uvloop

from loraplex.api.server.open_files import raise_open_files

ADDRESSES_PER_MEMBER = 4
"""A connection's port is not free again for a minute after it; each address has 28,000."""
OPENING_AT_ONCE = 500
"""A connection that finds the server's queue full is tried again after a second."""
SLOW_BYTES, SLOW_SECONDS = 16, 1.0
"""What half of the slow readers take, and how often; the others take nothing."""
SLOW_LOGPROBS = 5
"""They make a token's event so long that what the system keeps for a reader is soon full."""
SLOW_LIFE_SECONDS = 75.0
"""Then a slow reader goes away, and comes again: it cannot see that the server gave it up."""
SLOW_BUFFER_BYTES = 4 << 10
REOPEN_SECONDS = 0.5
ARRIVAL_SECONDS = 10.0
"""Over which idle connections come: as long as the server waits for a head, so that those that it
closes and that come again do so evenly."""
_TAIL_BYTES = 1 << 10
_CODE = re.compile(rb'"code":"(\w+)"')


@dataclass(frozen=True)
class Plan:
    """What a member does."""

    kind: str
    """`streams`, `slow` or `idle`."""
    number: int
    """Which member it is, from 0."""
    host: str
    port: int
    num_clients: int
    keys: Sequence[str] = ()
    """Of the tenants, who take turns."""
    model: str = ""
    num_tokens: int = 0

    def source(self, client: int) -> tuple[str, int]:
        """A local address of this member's own, and any port."""
        return f"127.0.{self.number + 1}.{client % ADDRESSES_PER_MEMBER + 1}", 0

    def request(self, client: int, **more: object) -> bytes:
        """For a stream of so many tokens, after which the server closes."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": f"client {client}",
                "max_tokens": self.num_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **more,
            }
        ).encode()
        key = self.keys[client % len(self.keys)]
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass
class Seen:
    """What the clients of one member have seen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Streams: `whole`, a published code, or what is wrong. Others: how connections ended."""
    most_open: int = 0
    """Streams that had begun and not ended, at one time."""
    least_open: int = 0
    """Idle connections at one time, once all had been opened."""
    seconds_per_token: list[float] = field(default_factory=list)
    """Of whole streams, from the first token to the last."""
    first_token_seconds: list[float] = field(default_factory=list)


class Reader(asyncio.Protocol):
    """Reads one stream as fast as it comes."""

    def __init__(self, request: bytes, has_begun: asyncio.Event) -> None:
        self._request = request
        self._has_begun = has_begun
        self.has_ended = asyncio.Event()
        self.first_at = self.last_at = 0.0
        self.tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"data: {" in data and not self.first_at:
            self.first_at = time.monotonic()
            self._has_begun.set()
        if b'"usage":{' not in data:
            self.last_at = time.monotonic()
        self.tail = (self.tail + data)[-_TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_begun.set()
        self.has_ended.set()

    def outcome(self, num_tokens: int) -> str:
        if b"data: [DONE]" in self.tail:
            is_right = b'"completion_tokens":%d,' % num_tokens in self.tail
            return "whole" if is_right else f"not {num_tokens} tokens: {self.tail[-300:]!r}"
        code = _CODE.search(self.tail)
        return code[1].decode() if code else f"broken off: {self.tail[-100:]!r}"


class Streams:
    """All at once, each to its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_open = 0
        self._seen = Seen()

    async def run(self) -> Seen:
        gate = asyncio.Semaphore(OPENING_AT_ONCE)
        begun = [asyncio.Event() for _ in range(self._plan.num_clients)]
        tasks = [
            asyncio.create_task(self._stream(client, gate, has_begun))
            for client, has_begun in enumerate(begun)
        ]
        for has_begun in begun:
            await has_begun.wait()
        say("all there")
        await asyncio.gather(*tasks)
        return self._seen

    async def _stream(self, client: int, gate: asyncio.Semaphore, has_begun: asyncio.Event) -> None:
        plan, seen = self._plan, self._seen
        loop = asyncio.get_running_loop()
        reader = Reader(plan.request(client), has_begun)
        begun_at = time.monotonic()
        try:
            async with gate:
                await loop.create_connection(
                    lambda: reader, plan.host, plan.port, local_addr=plan.source(client)
                )
        except OSError as exc:
            seen.outcomes[f"no connection: {exc}"] += 1
            has_begun.set()
            return
        await has_begun.wait()
        self._num_open += 1
        seen.most_open = max(seen.most_open, self._num_open)
        await reader.has_ended.wait()
        self._num_open -= 1
        outcome = reader.outcome(plan.num_tokens)
        seen.outcomes[outcome] += 1
        if outcome == "whole":
            seconds = reader.last_at - reader.first_at
            seen.seconds_per_token.append(seconds / (plan.num_tokens - 1))
            seen.first_token_seconds.append(reader.first_at - begun_at)


class SlowReaders:
    """Ask for long streams and take next to nothing of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen = Seen()

    async def run(self) -> Seen:
        tasks = [asyncio.create_task(self._stay(each)) for each in range(self._plan.num_clients)]
        say("all there")
        await end_of_input()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self._seen

    async def _stay(self, client: int) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SLOW_LIFE_SECONDS):
                    try:
                        await self._read(client)
                        self._seen.outcomes["ended by the server"] += 1
                    except OSError as exc:
                        self._seen.outcomes[f"cut off: {exc}"] += 1
                    await asyncio.sleep(REOPEN_SECONDS)
                continue
            self._seen.outcomes["went away"] += 1

    async def _read(self, client: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
            connection.bind(self._plan.source(client))
            await loop.sock_connect(connection, (self._plan.host, self._plan.port))
            await loop.sock_sendall(connection, self._plan.request(client, logprobs=SLOW_LOGPROBS))
            takes_some = client % 2
            while not takes_some or await loop.sock_recv(connection, SLOW_BYTES):
                await asyncio.sleep(SLOW_SECONDS)


class IdleConnection(asyncio.Protocol):
    """Sends what it is given, and then nothing."""

    def __init__(self, first_bytes: bytes) -> None:
        self._first_bytes = first_bytes
        self.is_lost = asyncio.get_running_loop().create_future()
        self.received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._first_bytes)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_lost.done():
            self.is_lost.set_result(exc)


KEEP_ALIVE_SECONDS = 75.0
"""For which the server keeps a connection after an answer. At first each client leaves at a time
within them, so that later the server does not close all of them together."""
SILENT, HALF_HEAD, KEEP_ALIVE = "silent", "half a head", "keep-alive"
FIRST_BYTES = {
    SILENT: b"",
    HALF_HEAD: b"GET /health HTTP/1.1\r\nHost: local",
    KEEP_ALIVE: b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
ALMOST_ALL = 0.95
"""So many of the idle connections are open at any time: the others come again."""
TURN = (SILENT, *3 * (KEEP_ALIVE,), HALF_HEAD, *3 * (KEEP_ALIVE,))
"""More of the silent would only mean that more come anew each second."""


class IdleConnections:
    """Connections that ask for nothing (more); those that the server closes are opened again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_open = 0
        self._is_full = False
        self._seen = Seen()

    async def run(self) -> Seen:
        gate = asyncio.Semaphore(OPENING_AT_ONCE)
        tasks = [
            asyncio.create_task(self._stay(client, gate))
            for client in range(self._plan.num_clients)
        ]
        await asyncio.sleep(ARRIVAL_SECONDS)
        while self._num_open < ALMOST_ALL * self._plan.num_clients:
            await asyncio.sleep(0.1)
        self._is_full, self._seen.least_open = True, self._num_open
        say("all there")
        await end_of_input()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self._seen

    async def _stay(self, client: int, gate: asyncio.Semaphore) -> None:
        kind, plan, loop = TURN[client % len(TURN)], self._plan, asyncio.get_running_loop()
        await asyncio.sleep(ARRIVAL_SECONDS * client / plan.num_clients)
        life = random.uniform(0, KEEP_ALIVE_SECONDS) if kind == KEEP_ALIVE else None
        while True:
            try:
                async with gate:
                    transport, connection = await loop.create_connection(
                        lambda: IdleConnection(FIRST_BYTES[kind]),
                        plan.host,
                        plan.port,
                        local_addr=plan.source(client),
                    )
            except OSError as exc:
                self._seen.outcomes[f"no connection: {exc}"] += 1
                await asyncio.sleep(REOPEN_SECONDS)
                continue
            self._num_open += 1
            try:
                async with asyncio.timeout(life):
                    lost = await connection.is_lost
                ending = _ending(connection.received, lost)
            except TimeoutError:
                ending = "went away"
            finally:
                transport.abort()
                self._num_open -= 1
            life = None
            if self._is_full:
                self._seen.least_open = min(self._seen.least_open, self._num_open)
            self._seen.outcomes[f"{kind}: {ending}"] += 1


def _ending(received: bytes, lost: Exception | None) -> str:
    """How a connection ended: by which answer, and whether it was reset."""
    status = received[9:12].decode() if received else "no answer"
    code = _CODE.search(received)
    answer = f"{status} {code[1].decode()}" if code else status
    return f"{answer}, {'closed' if lost is None else 'reset'}"


def say(line: str) -> None:
    print(line, flush=True)


async def end_of_input() -> None:
    await asyncio.to_thread(sys.stdin.read)


class Member(Protocol):
    """Clients of one kind."""

    async def run(self) -> Seen:
        """Until they have left."""


KINDS: Mapping[str, Callable[[Plan], Member]] = {
    "streams": Streams,
    "slow": SlowReaders,
    "idle": IdleConnections,
}


def main() -> None:
    raise_open_files()
    plan = Plan(**json.loads(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(KINDS[plan.kind](plan).run())
    say(json.dumps(vars(seen)))


if __name__ == "__main__":
    main()
