"""Events sent past the task of a stream, on a real connection with a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import h11
from starlette.types import Receive, Scope, Send

from loraplex.api.http.sse import EventStream, sse_data
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


async def ask(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    await writer.drain()


def test_events_in_between_are_whole_chunks_in_order_and_stop_for_a_slow_reader() -> None:
    said = [sse_data(b'"%d %s"' % (number, b"x" * 1000)) for number in range(5000)]
    numbers_at_once: list[int] = []
    is_held_up = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield b": begin\n\n"
            for number, event in enumerate(said):
                assert stream.reader is not None
                if stream.reader.unread_since is None:
                    stream.reader.send_at_once(event)
                    numbers_at_once.append(number)
                    await asyncio.sleep(0)
                else:
                    is_held_up.set()
                    yield event

        async def close() -> None:
            pass

        stream = EventStream(events(), headers={}, close=close, patience_seconds=60)
        assert stream.reader is None
        await stream(scope, receive, send)

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


def test_a_stream_ends_whose_caller_leaves_or_reads_nothing_while_events_are_sent_at_once() -> None:
    ends: asyncio.Queue[bool] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield b": begin\n\n"
            while True:
                assert stream.reader is not None
                if stream.reader.unread_since is None:
                    stream.reader.send_at_once(sse_data(b'"%s"' % (b"x" * 1000)))
                await asyncio.sleep(0)

        async def close() -> None:
            assert stream.reader is not None
            ends.put_nowait(stream.reader.unread_since is None)

        stream = EventStream(events(), headers={}, close=close, patience_seconds=0.2)
        await stream(scope, receive, send)

    async def scenario() -> None:
        async with ServedApp(app) as (_, writer):
            await ask(writer)  # and read nothing
            assert not await ends.get()
        async with ServedApp(app) as (reader, writer):
            await ask(writer)
            for _ in range(100):
                await reader.read(READ_BYTES)
            writer.close()
            await ends.get()

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))
