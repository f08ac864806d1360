"""Server-sent events for the official OpenAI clients.

An event without data or a lone `id:` breaks the client, so pings are comments. A failed stream ends
with an error object and without the end marker of a successful one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from types import coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..telemetry.request_measures import CLIENT_DISCONNECTED
from .disconnects import ClientDisconnected, unless_disconnected

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
PING_INTERVAL_SECONDS = 15.0

_LINE_BREAKS = {char.encode(): b"\\u%04x" % ord(char) for char in "\u0085\u2028\u2029"}
"""JSON leaves these characters unescaped. In this format they are not line breaks, but many clients
split at them."""
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_SENT = object()
"""Stands for the future that a send waits for if it waits for none."""


def sse_data(payload: bytes, *, name: str | None = None) -> bytes:
    """One event; `payload` is JSON, in which line breaks of ASCII and Unicode are escaped."""
    named = b"" if name is None else f"event: {name}\n".encode()
    return named + b"data: " + on_one_line(payload) + b"\n\n"


def on_one_line(payload: bytes) -> bytes:
    """The same JSON without line breaks of Unicode."""
    if not payload.isascii():
        for raw, escaped in _LINE_BREAKS.items():
            payload = payload.replace(raw, escaped)
    return payload


class EventStream(Response):
    """A 200 response whose body is `events`, with pings in between so that proxies keep it open.

    `close` is awaited exactly once in every case, even if no event was requested: the resources of
    a stream must not depend on its generator having been entered.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
        patience_seconds: float,
        ping: bytes = PING,
    ) -> None:
        """A client that reads nothing for `patience_seconds` counts as disconnected."""
        self.status_code = 200
        self.background = None
        self.events = events
        self.close = close
        self._patience_seconds = patience_seconds
        self._ping = ping
        self.reader: Reader | None = None
        """None before the response."""
        self.body = b""
        self.init_headers({**headers, **_HEADERS})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Layers between this and the outermost one only change the start of a response.
        send_body = scope.get("state", {}).get("send_body", send)
        try:
            await unless_disconnected(receive, self._send_all(send, send_body))
        except ClientDisconnected:
            scope.setdefault("state", {})["error_code"] = CLIENT_DISCONNECTED
        finally:
            await self.close()

    async def _send_all(self, send: Send, send_body: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        reader = self.reader = Reader(send_body, self._patience_seconds)
        pinging = asyncio.create_task(_send_pings(reader, self._ping))
        try:
            async with reader.patience():
                async for event in self.events:
                    await reader.send(event)
                await reader.send(b"", is_last=True)
        finally:
            pinging.cancel()
            reader.close()


async def _send_pings(reader: Reader, ping: bytes) -> None:
    while True:
        await asyncio.sleep(PING_INTERVAL_SECONDS)
        if reader.unread_since is None:
            await reader.send(ping)


class Reader:
    """The client of a stream, and how long it has read nothing.

    One timer watches a whole stream: a timeout around each event would cost more than the event.
    """

    def __init__(self, send: Send, patience_seconds: float) -> None:
        self._send = send
        self._patience_seconds = patience_seconds
        self._loop = asyncio.get_running_loop()
        self.unread_since: float | None = None
        """When the oldest unread data was sent; None if the client has read everything."""
        self._rest: asyncio.Task[None] | None = None
        """What is left of the last `send_at_once` that had to wait."""

    def send_at_once(self, body: bytes) -> None:
        """Send without waiting. Only while the stream's task waits for an event and the client has
        read everything. If sending has to wait, a task finishes it before anything else is sent.
        """
        message = {"type": "http.response.body", "body": body, "more_body": True}
        sending = self._send(message).__await__()
        waits_for = next(sending, _SENT)
        if waits_for is not _SENT:
            self.unread_since = self._loop.time()
            self._rest = self._loop.create_task(self._send_rest(waits_for, sending))

    async def send(self, body: bytes, *, is_last: bool = False) -> None:
        if self._rest is not None:
            await self._rest
            self._rest = None
        if self.unread_since is None:
            self.unread_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self.unread_since = None

    def close(self) -> None:
        """Give up what has not been sent."""
        if self._rest is not None:
            self._rest.cancel()

    async def _send_rest(self, waits_for: Any, sending: Generator[Any, Any, None]) -> None:
        await _resumed(waits_for, sending)
        self.unread_since = None

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Raises ClientDisconnected in the block once the client has read nothing for too long."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._watch(limit)
                yield
        except TimeoutError as exc:
            if limit.expired():
                raise ClientDisconnected from exc
            raise
        finally:
            self._timer.cancel()

    def _watch(self, limit: asyncio.Timeout) -> None:
        """Check again when the timeout of a client that is or becomes slow would expire."""
        now = self._loop.time()
        since = self.unread_since
        if since is None:
            since = now
        if now - since >= self._patience_seconds:
            limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(since + self._patience_seconds, self._watch, limit)


@coroutine
def _resumed(waits_for: Any, begun: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Awaits the rest of a coroutine that has run to its first wait."""
    yield waits_for
    yield from begun
