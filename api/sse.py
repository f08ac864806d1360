"""Server-sent events as the official OpenAI clients read them.

An event without data or a lone `id:` breaks the client, so pings are comments. A stream that fails
ends with an error object and without what ends those that succeed, so it cannot pass for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnects import CLIENT_DISCONNECTED, ClientDisconnected, unless_disconnected

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
PING_INTERVAL_SECONDS = 15.0

_LINE_BREAKS = {char.encode(): b"\\u%04x" % ord(char) for char in "\u0085\u2028\u2029"}
"""That JSON leaves as they are. To this format they are none, but many readers split at them."""
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def sse_data(payload: bytes, *, name: str | None = None) -> bytes:
    """One event; `payload` is JSON and gets no line breaks, of ASCII or of Unicode."""
    named = b"" if name is None else f"event: {name}\n".encode()
    if not payload.isascii():
        for raw, escaped in _LINE_BREAKS.items():
            payload = payload.replace(raw, escaped)
    return named + b"data: " + payload + b"\n\n"


class EventStream(Response):
    """A 200 whose body is `events`, with pings in between so that proxies keep it open.

    `close` is awaited exactly once, whatever happens, even if no event was ever asked for: the
    resources behind a stream must not depend on its generator having been entered.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
        patience_seconds: float,
    ) -> None:
        """A reader that takes nothing for `patience_seconds` counts as gone."""
        self.status_code = 200
        self.background = None
        self.events = events
        self.close = close
        self._patience_seconds = patience_seconds
        self.body = b""
        self.init_headers({**headers, **_HEADERS})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnected:
            scope.setdefault("state", {})["error_code"] = CLIENT_DISCONNECTED
        finally:
            await self.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        pinging = asyncio.create_task(self._ping(send))
        try:
            async for event in self.events:
                await self._send_body(send, event)
        finally:
            pinging.cancel()
        await self._send_body(send, b"", is_last=True)

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_SECONDS)
            await self._send_body(send, PING)

    async def _send_body(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._patience_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as exc:
            raise ClientDisconnected from exc
