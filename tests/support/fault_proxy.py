"""An HTTP proxy in front of an S3 server that injects planned faults.

It runs in its own thread. Every connection carries one request. Faults are planned per path and
consumed in order by the reads of that object. All other requests, including writes and listings,
follow the present weather, which by default is without faults.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

MAX_SECONDS = 60.0
"""For which a hanging answer hangs, if its reader is so patient."""
TRICKLE_SECONDS = 0.02
"""Between the bytes of an answer that trickles in."""
_HEAD_BYTES = 1 << 20
_RESET = struct.pack("ii", 1, 0)


class Fault(StrEnum):
    """What can happen to an answer."""

    SERVER_ERROR = "server_error"
    SLOW_DOWN = "slow_down"
    DENIED = "denied"
    MISSING = "missing"
    REDIRECT = "redirect"
    """To another host and bucket."""
    GARBAGE = "garbage"
    """No HTTP at all."""
    RESET = "reset"
    """The connection is reset before the answer ..."""
    RESET_WITHIN = "reset_within"
    """... or within its body."""
    TRUNCATED = "truncated"
    """The connection ends in order, but within the body."""
    SHORT = "short"
    """The last byte is missing, and the headers agree with that."""
    LONG = "long"
    BIT_FLIP = "bit_flip"
    WRONG_OBJECT = "wrong_object"
    """Other bytes, of the same length."""
    OTHER_OBJECT = "other_object"
    """What another path holds, of the same length if there was such an answer."""
    TRICKLE = "trickle"
    HANG = "hang"
    HANG_WITHIN = "hang_within"
    UNKEPT = "unkept"
    """A write is acknowledged, and nothing is kept of it."""


READ_FAULTS = tuple(fault for fault in Fault if fault is not Fault.UNKEPT)
"""What can happen to a read."""


class Request(NamedTuple):
    method: str
    path: str
    query: str
    head: bytes
    body: bytes

    @property
    def reads_object(self) -> bool:
        """Whether it is no listing and no write."""
        return self.method == "GET" and not self.query


class Answer(NamedTuple):
    head: bytes
    """Status line and headers, without the empty line."""
    body: bytes

    @property
    def headers(self) -> list[bytes]:
        return self.head.split(b"\r\n")[1:]

    def with_body(self, body: bytes, *, length: int | None = None) -> Answer:
        """This answer with other content, without what the server said to check it by."""
        status, *lines = self.head.split(b"\r\n")
        kept = [
            line
            for line in lines
            if not line.lower().startswith((b"content-length:", b"x-amz-checksum", b"x-amz-crc"))
        ]
        announced = b"Content-Length: %d" % (len(body) if length is None else length)
        return Answer(b"\r\n".join([status, *kept, announced]), body)

    def encode(self) -> bytes:
        return self.head + b"\r\n\r\n" + self.body


def s3_error(status: str, code: str, *headers: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode()
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/xml", "Connection: close", *headers]
    return Answer("\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode(), body)


ERRORS: Mapping[Fault, Answer] = {
    Fault.SERVER_ERROR: s3_error("500 Internal Server Error", "InternalError"),
    Fault.SLOW_DOWN: s3_error("503 Slow Down", "SlowDown"),
    Fault.DENIED: s3_error("403 Forbidden", "AccessDenied"),
    Fault.MISSING: s3_error("404 Not Found", "NoSuchKey"),
}
_ACKNOWLEDGED = Answer(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0", b"")
DAMAGES: Mapping[Fault, Callable[[Answer], Answer]] = {
    Fault.SHORT: lambda answer: answer.with_body(answer.body[:-1]),
    Fault.LONG: lambda answer: answer.with_body(answer.body + b"\0"),
    Fault.BIT_FLIP: lambda answer: answer.with_body(flipped(answer.body)),
    Fault.WRONG_OBJECT: lambda answer: answer.with_body(other_bytes(answer.body)),
    Fault.TRUNCATED: lambda answer: answer.with_body(
        answer.body[: len(answer.body) // 2], length=len(answer.body)
    ),
}


def flipped(content: bytes) -> bytes:
    """One bit in the middle is another."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def other_bytes(content: bytes) -> bytes:
    return hashlib.shake_128(content).digest(len(content))


Weather = Callable[[Request], Fault | None]
"""What a request meets for which nothing is planned."""


def fair(_: Request) -> None:
    """The weather that harms nothing."""


class FaultProxy:
    """A proxy at `url`, until the block is left."""

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        assert address.hostname, upstream
        self._upstream = (address.hostname, address.port or 80)
        self._plans: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._ready = threading.Event()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._together = 0
        self._arrived = asyncio.Condition()
        self.is_down = False
        """Whether every connection is reset at once."""
        self.weather: Weather = fair
        self._read: dict[str, bytes] = {}
        """What reads were answered, by path."""
        self.redirect_to = "http://127.0.0.1:9/other-bucket/key"
        self.num_requests: Counter[tuple[str, str]] = Counter()
        """By method and path."""
        self.part_numbers: list[int] = []
        """Of the parts that were sent, in their order."""
        self.num_faults: Counter[Fault] = Counter()
        self.num_open = 0
        """Reads of objects that are not answered yet."""
        self.most_open = 0
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)

    def plan(self, path: str, faults: Iterable[Fault]) -> None:
        """The next reads of `path` meet these faults, one each, in place of what was planned."""
        self._plans[path] = deque(faults)

    def clear(self) -> None:
        """Nothing more is planned."""
        self._plans.clear()

    def answer_together(self, num_requests: int) -> None:
        """Hold reads until so many wait at the same time, then answer them; 0: do not hold."""
        asyncio.run_coroutine_threadsafe(self._set_together(num_requests), self._loop).result(30)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set_together(self, num_requests: int) -> None:
        async with self._arrived:
            self._together = num_requests
            self._arrived.notify_all()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                await self._handle(reader, writer)
        finally:
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            reset(writer)
            return
        request = await read_request(reader, writer)
        self.num_requests[request.method, request.path] += 1
        if number := parse_qs(request.query).get("partNumber"):
            self.part_numbers.append(int(number[0]))
        if not request.reads_object:
            await self._answer(request, self.weather(request), reader, writer)
            return
        plan = self._plans[request.path]
        fault = plan.popleft() if plan else self.weather(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._wait_for_others()
            await self._answer(request, fault, reader, writer)
        finally:
            self.num_open -= 1

    async def _wait_for_others(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()
            while self.num_open < self._together:
                await self._arrived.wait()
            self._together = 0
            self._arrived.notify_all()

    async def _answer(
        self,
        request: Request,
        fault: Fault | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if fault is None:
            writer.write((await self._forward(request)).encode())
        else:
            self.num_faults[fault] += 1
            await self._harm(request, fault, reader, writer)
        await writer.drain()

    async def _harm(
        self,
        request: Request,
        fault: Fault,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if fault in ERRORS:
            writer.write(ERRORS[fault].encode())
        elif fault is Fault.UNKEPT:
            writer.write(_ACKNOWLEDGED.encode())
        elif fault is Fault.OTHER_OBJECT:
            answer = await self._forward(request)
            writer.write(answer.with_body(self._body_of_another(request, answer.body)).encode())
        elif fault in DAMAGES:
            writer.write(DAMAGES[fault](await self._forward(request)).encode())
        elif fault is Fault.REDIRECT:
            location = f"Location: {self.redirect_to}"
            writer.write(s3_error("307 Temporary Redirect", "TemporaryRedirect", location).encode())
        elif fault is Fault.GARBAGE:
            writer.write(b"\x00\xffthis is not HTTP\r\n\r\n")
        elif fault is Fault.RESET:
            reset(writer)
        elif fault is Fault.HANG:
            await until_reader_leaves(reader)
        else:
            await self._break_off(await self._forward(request), fault, reader, writer)

    async def _break_off(
        self,
        answer: Answer,
        fault: Fault,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Send half of the body, and then less than the rest."""
        half = len(answer.body) // 2
        writer.write(answer.head + b"\r\n\r\n" + answer.body[:half])
        await writer.drain()
        if fault is Fault.RESET_WITHIN:
            reset(writer)
        elif fault is Fault.HANG_WITHIN:
            await until_reader_leaves(reader)
        else:
            for byte in answer.body[half:]:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(TRICKLE_SECONDS)

    async def _forward(self, request: Request) -> Answer:
        """The server's own answer, read to its end."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(request.head + b"\r\n\r\n" + request.body)
            raw = await reader.read()
        finally:
            writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        if request.reads_object and b" 200 " in head[:16]:
            self._read[request.path] = body
        return Answer(head, body)

    def _body_of_another(self, request: Request, own: bytes) -> bytes:
        others = [body for path, body in self._read.items() if path != request.path]
        return next((body for body in others if len(body) == len(own)), [*others, b""][0])


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    """One request, its connection headers replaced by ours. Raises IncompleteReadError."""
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)}
    if headers.get(b"expect", b"").lower() == b"100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    kept = [line for line in lines if not line.lower().startswith((b"expect:", b"connection:"))]
    method, target, _ = first.decode().split(" ")
    path, _, query = target.partition("?")
    rest = b"\r\n".join([first, *kept, b"Connection: close"])
    return Request(method, path, query, rest, body)


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection by RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def until_reader_leaves(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(MAX_SECONDS):
        await reader.read()
