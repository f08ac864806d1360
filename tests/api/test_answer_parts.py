"""Stream parts written past ASGI, on a real connection with a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import h11
from starlette.types import Receive, Scope, Send

from loraplex.api.http.sse import PARTS_EXTENSION, EventStream, sse_data
from support.served_app import ServedApp

READ_BYTES = 1 << 16


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """The body of the next answer, as another implementation of HTTP reads it, and in how many
    chunks it came."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "test")]))
    connection.send(h11.EndOfMessage())
    body, num_chunks = b"", 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Data):
            body += event.data
            num_chunks += event.chunk_end
        elif isinstance(event, h11.EndOfMessage):
            return body, num_chunks
        else:
            assert isinstance(event, h11.Response), event


async def ask(writer: asyncio.StreamWriter, method: str = "GET") -> None:
    writer.write(f"{method} / HTTP/1.1\r\nHost: test\r\n\r\n".encode())
    await writer.drain()


def test_events_in_between_are_whole_chunks_in_order_and_stop_for_a_slow_reader() -> None:
    said = [sse_data(b'"%d %s"' % (number, b"x" * 1000)) for number in range(5000)]
    numbers_at_once: list[int] = []
    is_held_up = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield b": begin\n\n"
            for number, event in enumerate(said):
                assert stream.parts is not None
                if stream.parts.is_ready:
                    stream.parts.write(event)
                    numbers_at_once.append(number)
                    await asyncio.sleep(0)
                else:
                    is_held_up.set()
                    yield event

        async def close() -> None:
            pass

        stream = EventStream(events(), headers={}, close=close, patience_seconds=60)
        assert stream.parts is None
        await stream(scope, receive, send)
        assert stream.parts is not None
        assert not stream.parts.is_ready

    async def scenario() -> None:
        async with ServedApp(app) as (reader, writer):
            for _ in range(2):  # the connection is as good as new afterwards
                is_held_up.clear()
                numbers_at_once.clear()
                await ask(writer)
                await is_held_up.wait()
                assert len(numbers_at_once) < len(said)
                body, num_chunks = await read_answer(reader)
                assert body == b": begin\n\n" + b"".join(said)
                assert num_chunks == 1 + len(said)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_nothing_is_taken_for_a_caller_that_has_gone() -> None:
    has_gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope["extensions"][PARTS_EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert parts.is_ready
        while (await receive())["type"] != "http.disconnect":
            pass
        assert not parts.is_ready
        has_gone.set()

    async def scenario() -> None:
        async with ServedApp(app) as (_, writer):
            await ask(writer)
            writer.close()
            await has_gone.wait()

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_answers_without_chunks_have_no_parts() -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope["extensions"].get(PARTS_EXTENSION) if "extensions" in scope else None
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        seen.append(parts is not None and parts.is_ready)
        await send({"type": "http.response.body", "body": b"ok"})

    async def scenario() -> None:
        async with ServedApp(app) as (reader, writer):
            for method in ("GET", "HEAD"):
                await ask(writer, method)
                await reader.readuntil(b"ok" if method == "GET" else b"\r\n\r\n")

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))
    assert seen == [False, False]
