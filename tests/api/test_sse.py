"""Streams on the wire, event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from loraplex.api.http import sse
from loraplex.api.http.disconnects import ClientDisconnected, unless_disconnected
from loraplex.api.http.sse import DONE, PING, EventStream, sse_data

BREAKS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
"""Where `str.splitlines` splits."""


@pytest.mark.parametrize("char", BREAKS, ids=lambda char: f"U+{ord(char):04X}")
def test_an_event_is_one_line_wherever_a_reader_splits(char: str) -> None:
    said = {"text": f"\\{char}é\U0001f600{char}"}
    data, end = sse_data(msgspec.json.encode(said)).decode().splitlines()
    assert json.loads(data.removeprefix("data: ")) == said
    assert end == ""


class Connection:
    """A caller that records what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.has_gone = asyncio.Event()
        self.is_stuck = False
        self.has_room = asyncio.Event()
        self.patience_seconds = 30.0
        self.num_closed = 0

    async def receive(self) -> Message:
        await self.has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.is_stuck and message["type"] == "http.response.body":
            await self.has_room.wait()
        self.sent.append(message)

    async def close(self) -> None:
        self.num_closed += 1

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    def stream(self, events: AsyncIterator[bytes]) -> EventStream:
        return EventStream(
            events,
            headers={"x-test": "1"},
            close=self.close,
            patience_seconds=self.patience_seconds,
        )

    async def serve(self, events: AsyncIterator[bytes]) -> None:
        await self.stream(events)({"type": "http"}, self.receive, self.send)


def run(scenario: Callable[[Connection], Coroutine[Any, Any, None]]) -> Connection:
    async def main() -> Connection:
        connection = Connection()
        await scenario(connection)
        return connection

    return asyncio.run(main())


async def two_events() -> AsyncIterator[bytes]:
    yield sse_data(b"1")
    yield DONE


def test_a_stream_is_its_events_and_an_end() -> None:
    connection = run(lambda connection: connection.serve(two_events()))
    assert connection.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert connection.is_complete
    assert connection.num_closed == 1
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-test"] == b"1"
    assert b"content-length" not in headers


def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_INTERVAL_SECONDS", 0.001)

    async def scenario(connection: Connection) -> None:
        async def silent() -> AsyncIterator[bytes]:
            while connection.body.count(PING) < 3:
                await asyncio.sleep(0)
            yield DONE

        await connection.serve(silent())

    connection = run(scenario)
    assert connection.body.replace(PING, b"") == DONE
    assert connection.is_complete


def test_a_caller_that_goes_away_ends_the_stream() -> None:
    async def scenario(connection: Connection) -> None:
        async def endless() -> AsyncIterator[bytes]:
            yield sse_data(b"1")
            connection.has_gone.set()
            await asyncio.Event().wait()

        await connection.serve(endless())

    connection = run(scenario)
    assert connection.num_closed == 1
    assert not connection.is_complete


def test_a_caller_that_was_gone_before_the_first_event_costs_nothing() -> None:
    async def scenario(connection: Connection) -> None:
        connection.has_gone.set()

        async def never_entered() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        await connection.serve(never_entered())

    assert run(scenario).num_closed == 1


def test_a_caller_that_reads_nothing_counts_as_gone() -> None:
    async def scenario(connection: Connection) -> None:
        connection.is_stuck, connection.patience_seconds = True, 0.001
        await connection.serve(two_events())

    connection = run(scenario)
    assert connection.num_closed == 1
    assert not connection.is_complete


def test_silence_is_not_held_against_a_reader_who_takes_what_comes() -> None:
    async def scenario(connection: Connection) -> None:
        connection.patience_seconds = 0.001

        async def slow() -> AsyncIterator[bytes]:
            for number in range(3):
                yield sse_data(str(number).encode())
                await asyncio.sleep(0.01)
            connection.is_stuck = True
            yield sse_data(b"never taken")

        await connection.serve(slow())

    connection = run(scenario)
    assert connection.body == b"".join(sse_data(str(number).encode()) for number in range(3))
    assert connection.num_closed == 1
    assert not connection.is_complete


def test_an_event_is_sent_at_once_and_one_that_must_wait_comes_before_all_others() -> None:
    async def scenario(connection: Connection) -> None:
        async def events() -> AsyncIterator[bytes]:
            reader = stream.reader
            assert reader is not None
            reader.send_at_once(b"1")
            assert connection.body == b"1"
            connection.is_stuck = True
            reader.send_at_once(b"2")
            assert reader.unread_since is not None
            connection.is_stuck = False  # nothing overtakes what waits
            asyncio.get_running_loop().call_later(0.01, connection.has_room.set)
            yield b"3"
            assert reader.unread_since is None
            connection.is_stuck = True
            connection.has_room.clear()
            reader.send_at_once(b"4")
            connection.has_room.set()
            while reader.unread_since is not None:
                await asyncio.sleep(0)
            reader.send_at_once(b"5")

        stream = connection.stream(events())
        assert stream.reader is None
        await stream({"type": "http"}, connection.receive, connection.send)

    connection = run(scenario)
    assert connection.body == b"12345"
    assert connection.is_complete


def test_a_caller_that_reads_nothing_of_what_is_sent_at_once_counts_as_gone() -> None:
    async def scenario(connection: Connection) -> None:
        connection.patience_seconds = 0.01

        async def events() -> AsyncIterator[bytes]:
            reader = stream.reader
            assert reader is not None
            connection.is_stuck = True
            reader.send_at_once(b"never taken")
            await asyncio.Event().wait()
            yield b""

        stream = connection.stream(events())
        await stream({"type": "http"}, connection.receive, connection.send)
        connection.has_room.set()
        await asyncio.sleep(0.01)

    connection = run(scenario)
    assert connection.body == b""
    assert connection.num_closed == 1
    assert not connection.is_complete


def test_an_error_of_what_was_sent_at_once_is_the_streams() -> None:
    async def scenario(connection: Connection) -> None:
        async def fail(message: Message) -> None:
            if message["type"] == "http.response.body":
                await connection.has_room.wait()
                raise RuntimeError("planted")

        async def events() -> AsyncIterator[bytes]:
            reader = stream.reader
            assert reader is not None
            reader.send_at_once(b"1")
            connection.has_room.set()
            yield b"2"

        stream = connection.stream(events())
        with pytest.raises(RuntimeError, match="planted"):
            await stream({"type": "http"}, connection.receive, fail)

    assert run(scenario).num_closed == 1


def test_a_timeout_of_the_events_themselves_is_not_the_readers() -> None:
    async def scenario(connection: Connection) -> None:
        async def late() -> AsyncIterator[bytes]:
            yield sse_data(b"1")
            raise TimeoutError("planted")

        with pytest.raises(TimeoutError, match="planted"):
            await connection.serve(late())

    assert run(scenario).num_closed == 1


def test_an_unexpected_error_breaks_the_connection_instead_of_ending_it() -> None:
    async def scenario(connection: Connection) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield sse_data(b"1")
            raise RuntimeError("planted")

        with pytest.raises(RuntimeError, match="planted"):
            await connection.serve(broken())

    connection = run(scenario)
    assert connection.num_closed == 1
    assert not connection.is_complete


def test_work_is_cancelled_when_its_caller_goes_away() -> None:
    async def scenario(connection: Connection) -> None:
        was_cancelled = False

        async def work() -> None:
            nonlocal was_cancelled
            connection.has_gone.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        with pytest.raises(ClientDisconnected):
            await unless_disconnected(connection.receive, work())
        assert was_cancelled

    run(scenario)


def test_work_that_is_cancelled_otherwise_is_not_taken_for_a_caller_that_left() -> None:
    async def scenario(connection: Connection) -> None:
        working = asyncio.create_task(
            unless_disconnected(connection.receive, asyncio.Event().wait())
        )
        await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    run(scenario)


def test_a_cancellation_holds_that_comes_while_its_caller_leaves() -> None:
    async def scenario(connection: Connection) -> None:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                working.cancel()

        working = asyncio.create_task(unless_disconnected(connection.receive, work()))
        await asyncio.sleep(0)
        connection.has_gone.set()
        with pytest.raises(asyncio.CancelledError):
            await working

    run(scenario)


def test_whoever_catches_that_its_caller_left_may_wait_on() -> None:
    async def scenario(connection: Connection) -> None:
        connection.has_gone.set()
        with pytest.raises(ClientDisconnected):
            await unless_disconnected(connection.receive, asyncio.Event().wait())
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    run(scenario)


def test_work_that_ends_first_gives_its_result_or_its_error() -> None:
    async def scenario(connection: Connection) -> None:
        async def succeed() -> int:
            return 7

        async def fail() -> int:
            raise ValueError("planted")

        assert await unless_disconnected(connection.receive, succeed()) == 7
        with pytest.raises(ValueError, match="planted"):
            await unless_disconnected(connection.receive, fail())

    run(scenario)
