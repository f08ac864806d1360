"""Which connection is closed when there are more than the server may have open."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from loraplex.api.http.connections import Connections
from support.served_app import ServedApp
from support.server import child_environment

ASK = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"
ASK_AND_WAIT = b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n"
HALF_A_HEAD = b"GET /now HTTP/1.1\r\nHo"


class Answering:
    """Answers at once, or what is asked for under `/later` when it is told to."""

    def __init__(self) -> None:
        self.is_time = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/later":
            await self.is_time.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    @asynccontextmanager
    async def answering_in_the_end(self) -> AsyncIterator[None]:
        """Whatever fails within: the server waits for its requests."""
        try:
            yield
        finally:
            self.is_time.set()


def test_the_one_that_was_idle_for_longest_goes() -> None:
    async def scenario() -> None:
        served = ServedApp(app := Answering(), max_connections=4)
        async with served as (silent, silent_writer), app.answering_in_the_end():
            half, half_writer = await served.connect()
            half_writer.write(HALF_A_HEAD)
            working, working_writer = await served.connect()
            working_writer.write(ASK_AND_WAIT)
            kept, kept_writer = await served.connect()
            kept_writer.write(ASK)
            await kept.readuntil(b"ok")
            writers = [half_writer, working_writer, kept_writer]

            for idle, idle_writer in ((silent, silent_writer), (half, half_writer)):
                _, newcomer = await served.connect()
                newcomer.write(ASK_AND_WAIT)
                writers.append(newcomer)
                head, _, body = (await asyncio.wait_for(idle.read(-1), 10)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert json.loads(body)["error"]["code"] == "too_many_connections"
                idle_writer.close()
                await asyncio.sleep(0.05)  # the server sees it go
            writers.append((await served.connect())[1])
            assert await asyncio.wait_for(kept.read(-1), 10) == b"", "it had its answer"

            app.is_time.set()
            assert (await asyncio.wait_for(working.readuntil(b"ok"), 10)).endswith(b"ok")
            for writer in writers:
                writer.close()

    asyncio.run(scenario())


def test_who_comes_while_all_are_at_work_is_told_so() -> None:
    async def scenario() -> None:
        served = ServedApp(app := Answering(), max_connections=1)
        async with served as (working, writer), app.answering_in_the_end():
            writer.write(ASK_AND_WAIT)
            await asyncio.sleep(0.05)
            newcomer, newcomers_writer = await served.connect()
            newcomers_writer.write(ASK)
            assert b"too_many_connections" in await asyncio.wait_for(newcomer.read(-1), 10)
            newcomers_writer.close()
            app.is_time.set()
            await working.readuntil(b"ok")

    asyncio.run(scenario())


@dataclass(eq=False)
class Recorded:
    """A connection that leaves when it is told to."""

    told: list[bool] = field(default_factory=list)
    """Whether at once."""

    def make_room(self, *, at_once: bool) -> None:
        self.told.append(at_once)


def test_a_flood_is_closed_without_a_word() -> None:
    """Those that are being told why count too: the bound is exceeded by an eighth and one."""
    connections = Connections(8)
    flood = [Recorded() for _ in range(12)]
    for each in flood:
        connections.open(each)
    assert [each.told for each in flood[:5]] == [[False], [False], [True], [True], []]


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    code = (
        "import resource; from loraplex.api.server.open_files import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))\n"
        "print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    answer = subprocess.check_output([sys.executable, "-c", code], env=child_environment())
    assert answer.split() == [b"512", b"512", b"512"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 512
