"""HTTP/1.1 for untrusted clients: uvicorn's protocol with checks of the head and limits.

httptools parses the bytes and uvicorn runs the application. uvicorn waits indefinitely for a head,
buffers all of it, treats the trailers of a chunked body as headers, loses the body of a request
that offers an upgrade, and reads on after a body has been answered. Each of these is limited or
refused here, with the application's error format.

`test_http_protocol` lists what this class uses beyond uvicorn's documented interface.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from asyncio import TimerHandle
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...adapters.wiping import wipe
from ..contract.errors import ApiError, encode_error
from .connections import Connections
from .head import MAX_HEAD_BYTES, Head, check_head
from .wiped_reads import WipedBody, WipedReads

log = structlog.get_logger(__name__)

HEAD_SECONDS = 10.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
FAREWELL_SECONDS = 2.0
"""How long a refused client's data is read: if the connection were closed at once, its system would
discard the response."""
UNREAD_BODY_SECONDS = 10.0
"""How long the rest of a body is read after its response."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    connections_of_server = Connections(sys.maxsize)
    """Among which it is; see `protocol_among`."""
    _deadline: TimerHandle | None = None
    _framing_bytes = 0
    """Received since the head began, or since the last byte of a body: heads, chunks' extensions,
    trailers."""
    _is_in_body = False
    """After a request's head and before its end."""
    _ignores_input = False
    """Further input is no longer read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_protocol(WipedReads(self))
        self._begin_head(num_bytes=0)
        self.connections_of_server.open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_of_server.close(self)
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as exc:
            refusal = exc.__context__  # raised in a callback
            self._refuse(
                refusal if isinstance(refusal, ApiError) else ApiError("malformed_request")
            )
        else:
            if self._framing_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError("headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:  # otherwise it is the connection's first request
            self._begin_head(num_bytes=1)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:  # otherwise it is a trailer, which is never read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        check_head(self._head())
        if self.parser.should_upgrade():
            return  # the parser stops here; `_parse` gives it the head again
        super().on_headers_complete()
        self._is_in_body = True
        self._cancel_deadline()
        self.connections_of_server.work(self)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if not isinstance(self.cycle.body, WipedBody):
            # uvicorn begins a new bytearray after each part that the application takes.
            self.cycle.body = WipedBody()  # type: ignore[assignment]
        super().on_body(body)
        if self.cycle.response_complete:
            wipe(body)  # it is never read
            if self._deadline is None:
                self._set_deadline(UNREAD_BODY_SECONDS, self.transport.close)

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:
            self.cycle.body = bytearray()  # discard the unread body
        super().on_response_complete()
        self._note_rest()

    def on_message_complete(self) -> None:
        if not self._is_in_body:
            return  # an upgrade
        super().on_message_complete()
        self._is_in_body = False
        self._cancel_deadline()
        self._note_rest()

    def timeout_keep_alive_handler(self) -> None:
        # The time since the last response. uvicorn would measure it again from every byte: empty
        # lines would keep a connection open forever.
        if self.cycle.response_complete and self._deadline is None:
            super().timeout_keep_alive_handler()

    def make_room(self, *, at_once: bool) -> None:
        """Only a connection that has not sent a request gets a message: others would take it for
        the response to their next request."""
        if at_once:
            self.transport.abort()
        elif self.cycle is None:
            self._refuse(ApiError("too_many_connections"))
        else:
            self.transport.close()

    def _note_rest(self) -> None:
        is_open = not (self._ignores_input or self.transport.is_closing())
        if is_open and self.cycle.response_complete and not self._is_in_body:
            self.connections_of_server.rest(self)

    def _head(self) -> Head:
        parser = self.parser
        headers = list(self.scope["headers"])
        return Head(parser.get_method(), parser.get_http_version(), self.url, headers)

    def _parse(self, data: bytes) -> None:
        """Offers of an upgrade are ignored, as HTTP allows. The parser would end with the head, and
        take the body for the next request: it reads the head once more, without the offer.
        """
        rest: bytes | memoryview = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as exc:
                rest = memoryview(rest)[exc.args[0] :]
                head = self._head().without(b"upgrade")
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)

    def _begin_head(self, *, num_bytes: int) -> None:
        self._framing_bytes = num_bytes
        self._set_deadline(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_deadline(HEAD_SECONDS, self._head_is_late)
        elif self._framing_bytes:
            self._refuse(ApiError("request_timeout"))
        else:
            self.transport.close()

    def _set_deadline(self, seconds: float, act: Callable[[], None]) -> None:
        self._deadline = asyncio.get_running_loop().call_later(seconds, act)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: ApiError) -> None:
        """Stop reading and close. A preceding complete request is still answered. A request whose
        body broke off ends with this error, unless its response has started."""
        if self._ignores_input or self.transport.is_closing():
            return
        self._ignores_input = True
        self._cancel_deadline()
        request_id = f"req-{secrets.token_hex(12)}"
        log.info("request_refused_unparsed", request_id=request_id, code=error.code)
        cycle = self.cycle
        if self._is_in_body:
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            cycle.disconnected = True  # ends the application's reading of the body
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            self.shutdown()  # closes after the answer
            return
        self.transport.write(_refusal_bytes(error, request_id))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_deadline(FAREWELL_SECONDS, self.transport.close)


def protocol_among(connections: Connections) -> type[BoundedHttpProtocol]:
    """The protocol of a server with these connections."""
    return type("HttpProtocol", (BoundedHttpProtocol,), {"connections_of_server": connections})


def _refusal_bytes(error: ApiError, request_id: str) -> bytes:
    body = encode_error(error, request_id)
    headers: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "x-should-retry": str(error.retryable).lower(),
        "x-request-id": request_id,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = HTTPStatus(error.published.status)
    return f"HTTP/1.1 {status} {status.phrase}\r\n{lines}\r\n".encode() + body
