"""HTTP/1.1 as it comes from strangers: uvicorn's protocol with bounds on what is not a request yet.

uvicorn waits for ever for the end of a request's head, keeps all of it, and goes on reading a body
that has been answered already. Here all three are bounded, and what is refused before the
application sees it is answered with the same envelope.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from asyncio import TimerHandle
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from .errors import ApiError, encode_error
from .sse import PARTS_EXTENSION

log = structlog.get_logger(__name__)

HEAD_SECONDS = 10.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
MAX_HEAD_BYTES = 64 << 10
FAREWELL_SECONDS = 2.0
"""How long a refused sender is listened to: closed at once, its system would drop our answer."""
UNREAD_BODY_SECONDS = 10.0
"""How long the rest of a body is read whose request has been answered."""


class AnswerParts:
    """Writes parts of an answer that has begun, past everything that wraps ASGI's `send`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # its scope has this
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        """A part can be written now; else `send` knows what to wait for, or that nobody reads."""
        cycle = self._cycle()
        return (
            cycle is not None
            and cycle.chunked_encoding is True
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, body: bytes) -> None:
        """The next part, not empty; only while `is_ready`."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _deadline: TimerHandle | None = None
    _head_bytes = 0
    _is_in_head = True
    _is_refused = False
    _refusal = "malformed_request"
    """What unreadable bytes are answered with."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head(num_bytes=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_in_head:
            self._begin_head(num_bytes=1)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refusal = "headers_too_large"
            raise ValueError  # uvicorn takes it for what cannot be parsed
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise ValueError
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[PARTS_EXTENSION] = AnswerParts(self.cycle)
        self._is_in_head = False
        self._cancel_deadline()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete and self._deadline is None:
            self._deadline = self.loop.call_later(UNREAD_BODY_SECONDS, self.transport.close)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._cancel_deadline()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what cannot be parsed; its own words are not passed on."""
        self._refuse(self._refusal)

    def _begin_head(self, *, num_bytes: int) -> None:
        self._is_in_head = True
        self._head_bytes = num_bytes
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        elif self._head_bytes:
            self._refuse("request_timeout")
        else:
            self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, code: str) -> None:
        """Answer and close. A request that runs on this connection ends with it; one whose answer
        has begun gets no other.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._cancel_deadline()
        request_id = f"req-{secrets.token_hex(12)}"
        log.info("request_refused_unparsed", request_id=request_id, code=code)
        if self._is_answering():
            self.transport.close()
            return
        if self.cycle is not None:  # its body broke off: the application reads a disconnect
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_refusal_bytes(code, request_id))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(FAREWELL_SECONDS, self.transport.close)

    def _is_answering(self) -> bool:
        """Bytes of an answer are out, or an earlier request still owes one."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self.cycle.response_started or bool(self.pipeline)


def _refusal_bytes(code: str, request_id: str) -> bytes:
    error = ApiError(code)
    body = encode_error(error, request_id)
    headers: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "x-should-retry": str(error.published.retryable).lower(),
        "x-request-id": request_id,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.published.status] + f"{lines}\r\n".encode() + body
