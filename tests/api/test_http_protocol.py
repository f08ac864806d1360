"""The private interfaces that the protocol relies on, and its reaction to invalid bytes."""

from __future__ import annotations

import ast
import asyncio
import inspect
import tomllib
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loraplex.api.http import protocol as http_protocol
from loraplex.api.http.head import MAX_HEAD_BYTES
from support.served_app import ServedApp

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OF_THE_PROTOCOL = {
    "cycle",
    "parser",
    "pipeline",
    "scope",
    "transport",
    "url",
}
"""What `BoundedHttpProtocol` takes from uvicorn's protocol, beside the methods of asyncio's and
httptools' own interfaces, `shutdown` and `timeout_keep_alive_handler`."""
OF_THE_CYCLE = {
    "body",
    "disconnected",
    "message_event",
    "response_complete",
    "response_started",
}
"""And what of the object that answers one request."""


def test_the_range_of_uvicorn_ends_with_the_minor_release_that_is_tested() -> None:
    declared = map(Requirement, tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])
    (allowed,) = (each.specifier for each in declared if each.name == "uvicorn")
    installed = Version(version("uvicorn"))
    assert installed in allowed
    assert f"{installed.major}.{installed.minor + 1}" not in allowed


def test_no_other_insides_of_uvicorn_are_used() -> None:
    used: dict[str, set[str]] = {"self": set(), "cycle": set()}
    for node in ast.walk(ast.parse(inspect.getsource(http_protocol))):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("self.")
            used.setdefault(owner, set()).add(node.attr)
    ours = {*vars(http_protocol.BoundedHttpProtocol), "shutdown"}
    assert used["self"] - ours == OF_THE_PROTOCOL
    assert used["cycle"] == OF_THE_CYCLE


def test_the_insides_are_there_in_the_installed_release() -> None:
    """Those of a cycle are used by the tests below."""

    async def scenario() -> None:
        config = uvicorn.Config(Echo(), lifespan="off", log_config=None, ws="none")
        protocol = HttpToolsProtocol(config, ServerState(), {})
        protocol.on_message_begin()
        assert {name for name in OF_THE_PROTOCOL if not hasattr(protocol, name)} == set()

    asyncio.run(scenario())


class Echo:
    """Answers with the names of the headers and the body; remembers both."""

    def __init__(self, *, reads_body: bool = True) -> None:
        self.reads_body = reads_body
        self.seen: list[tuple[str, list[bytes], bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, has_more = b"", self.reads_body
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            has_more = message["more_body"]
        names = [name for name, _ in scope["headers"]]
        self.seen.append((scope["path"], names, body))
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, timeout=60))


async def answers_to(app: Echo, *parts: bytes) -> bytes:
    """All that comes back; each part is a packet of its own."""
    async with ServedApp(app) as (reader, writer):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        return await reader.read(-1)


LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def test_trailers_are_no_headers_in_one_packet_or_several() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    tail = b"3\r\nabc\r\n0\r\nX-Forwarded-For: 203.0.113.1\r\nHost: y\r\n\r\n"

    async def scenario() -> None:
        for parts in (
            (head + tail + LAST,),
            (head, tail, LAST),
            (head + tail[:20], tail[20:], LAST),
        ):
            app = Echo()
            received = await answers_to(app, *parts)
            assert received.count(b"HTTP/1.1 200") == 2
            assert app.seen == [
                ("/a", [b"host", b"transfer-encoding"], b"abc"),
                ("/last", [b"host", b"connection"], b""),
            ]

    run(scenario())


def test_an_offer_to_upgrade_neither_loses_a_body_nor_makes_it_a_request() -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(inner)

    async def scenario() -> None:
        for parts in (
            (head + inner + LAST,),
            (head, inner, LAST),
            (head + inner, head + inner + LAST),
        ):
            app = Echo()
            received = await answers_to(app, *parts)
            assert [path for path, *_ in app.seen] == ["/a"] * (len(app.seen) - 1) + ["/last"]
            assert all(body == inner for path, _, body in app.seen if path == "/a")
            assert (
                received.count(b"HTTP/1.1 200") == len(app.seen) == b"".join(parts).count(b"/a") + 1
            )

    run(scenario())


def test_many_offers_in_one_packet_are_many_requests() -> None:
    offer = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    async def scenario() -> None:
        app = Echo()
        await answers_to(app, offer * 2000 + LAST)
        assert len(app.seen) == 2001

    run(scenario())


def test_what_follows_a_whole_request_does_not_take_its_answer_away() -> None:
    async def scenario() -> None:
        app = Echo()
        received = await answers_to(
            app, b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n" + LAST
        )
        assert [path for path, *_ in app.seen] == ["/a"]
        assert received.startswith(b"HTTP/1.1 200 OK\r\n")
        assert received.count(b"HTTP/1.1 ") == 1

    run(scenario())


def test_a_body_that_breaks_off_has_one_answer() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def scenario() -> None:
        unread = await answers_to(Echo(reads_body=False), head, b"nonsense\r\n", LAST)
        assert unread.startswith(b"HTTP/1.1 200 OK\r\n")
        assert unread.count(b"HTTP/1.1 ") == 1
        read = await answers_to(Echo(), head, b"nonsense\r\n", LAST)
        assert read.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert read.count(b"HTTP/1.1 ") == 1

    run(scenario())


def test_trailers_and_extensions_of_chunks_are_bounded_like_a_head() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    padding = b"a" * MAX_HEAD_BYTES

    async def scenario() -> None:
        for endless in (b"0\r\nX: " + padding, b"1;" + padding, (b"0\r\n" + b"X: y\r\n" * 11_000)):
            app = Echo()
            received = await answers_to(app, head, endless)
            assert received.startswith(b"HTTP/1.1 431 ")
            assert app.seen == []
        app = Echo()
        received = await answers_to(
            app, head, b"1;x=%b\r\na\r\n" % padding[:1000] * 100 + b"0\r\n\r\n" + LAST
        )
        assert [body for *_, body in app.seen] == [b"a" * 100, b""]

    run(scenario())


def test_empty_lines_do_not_keep_a_connection_open_and_a_running_request_does() -> None:
    keep_alive_seconds = 1

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(1.5 * keep_alive_seconds)
        await Echo()(scope, receive, send)

    async def scenario() -> None:
        async with ServedApp(app, keep_alive_seconds=keep_alive_seconds) as (reader, writer):
            for path in (b"/a", b"/slow"):
                writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
                assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
                await reader.readuntil(b"\r\n\r\n")
            answered_at = asyncio.get_running_loop().time()
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(b"\r\n")
                await asyncio.sleep(0.05)
            seconds = asyncio.get_running_loop().time() - answered_at
            assert reading.result() == b""
            assert keep_alive_seconds * 0.9 < seconds < keep_alive_seconds * 5

    run(scenario())
