"""Sends a line of a batch to its route, within the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .line import LINE, BatchLine

Message = MutableMapping[str, Any]
App = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[Message]],
        Callable[[Message], Awaitable[None]],
    ],
    Awaitable[None],
]
"""An ASGI application."""


class Answer(NamedTuple):
    """The response to a line."""

    status: int
    request_id: str
    body: bytes
    retry_after_seconds: float | None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def error(self) -> AnswerError:
        """What its body says of the error."""
        return msgspec.json.decode(self.body, type=_Envelope).error


class AnswerError(msgspec.Struct):
    code: str
    retryable: bool


class _Envelope(msgspec.Struct):
    error: AnswerError


async def call(
    app: App, endpoint: str, body: bytes, line: BatchLine, address: str | None
) -> Answer:
    """The application's answer to the line, as if its key had sent it from this address.

    The application checks the key, its restrictions and the tenant's limits, as of every request.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None if address is None else (address, 0),
        "server": None,
        "state": {LINE: line},
    }
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    received: list[Message] = []

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # it never disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        received.append(message)

    await app(scope, receive, send)
    start, *rest = received
    headers = dict(start["headers"])
    return Answer(
        start["status"],
        headers[b"x-request-id"].decode(),
        b"".join(message.get("body", b"") for message in rest),
        _retry_after(start["headers"]),
    )


def _retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    value = dict(headers).get(b"retry-after-ms")
    return None if value is None else float(value) / 1000
