"""A server with a certificate of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import httpx
import pytest
import uvloop

from loraplex.api.http import handshakes
from loraplex.api.http.connections import Connections
from loraplex.api.http.handshakes import Handshakes
from loraplex.api.serve import CannotUseCertificate, check_certificate
from loraplex.api.settings import Settings
from support.server import FAKE_ENGINE, ServerUnderTest, serving
from support.webhooks import make_certificates

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, HOST)
    return folder


@pytest.fixture(scope="module")
def server(
    certificates: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    files = (certificates / "server.pem", certificates / "server.key")
    options = ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificates / "authority.pem"))
        data_dir = tmp_path_factory.mktemp("tls") / "data"
        with serving(tiny_base, data_dir, *options, engine=FAKE_ENGINE) as running:
            yield running


def test_clients_are_served_over_tls(server: ServerUnderTest, tiny_base: Path) -> None:
    assert server.url.startswith("https://")
    caller = server.make_caller("acme")
    answer = caller.openai.completions.create(model=tiny_base.name, prompt="a", max_tokens=2)
    assert answer.usage
    assert answer.usage.completion_tokens == 2


def test_browsers_are_told_to_use_tls_and_may_sign_in(server: ServerUnderTest) -> None:
    answer = httpx.post(
        f"{server.url}/v1/session",
        json={"name": "nobody", "password": "no such password", "tenant": None},
        headers={"origin": server.url},
    )
    assert answer.json()["error"]["code"] == "sign_in_failed"
    assert "max-age" in answer.headers["strict-transport-security"]


def test_plain_http_is_not_served(server: ServerUnderTest) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url.replace('https', 'http')}/health")


def test_a_client_that_never_finishes_its_handshake_harms_no_other(
    server: ServerUnderTest,
) -> None:
    port = httpx.URL(server.url).port
    assert port is not None
    silent = [socket.create_connection((HOST, port)) for _ in range(50)]
    try:
        silent[0].sendall(b"\x16\x03\x01")  # the beginning of a handshake
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        for connection in silent:
            connection.close()
    assert httpx.get(f"{server.url}/health").status_code == 200


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def listening(certificates: Path, connections: Connections) -> AsyncIterator[int]:
    """A listener that echoes over TLS; its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with socket.create_server((HOST, 0)) as listener:
        accept = Handshakes(context, Echo, connections).accept(listener)
        accepting = asyncio.create_task(accept)
        try:
            yield listener.getsockname()[1]
        finally:
            accepting.cancel()
            with suppress(asyncio.CancelledError):
                await accepting


async def is_echoed(certificates: Path, port: int) -> bool:
    context = ssl.create_default_context(cafile=certificates / "authority.pem")
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    writer.write(b"hello")
    echoed = await reader.readexactly(5)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return echoed == b"hello"


def test_a_handshake_that_does_not_end_is_closed_after_its_time(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_SECONDS", 0.5)

    async def scenario() -> None:
        async with listening(certificates, Connections(10)) as port:
            reader, writer = await asyncio.open_connection(HOST, port)
            begun = time.monotonic()
            assert await asyncio.wait_for(reader.read(), 20) == b""
            assert time.monotonic() - begun > 0.4
            writer.close()
            assert await is_echoed(certificates, port)

    uvloop.run(scenario())


def test_the_handshake_that_waits_for_longest_makes_room_for_a_new_connection(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_SECONDS", 60.0)

    async def scenario() -> None:
        async with listening(certificates, Connections(2)) as port:
            silent = [await asyncio.open_connection(HOST, port) for _ in range(3)]
            assert await asyncio.wait_for(silent[0][0].read(), 20) == b""
            assert await is_echoed(certificates, port)
            assert await asyncio.wait_for(silent[1][0].read(), 20) == b""
            assert not silent[2][0].at_eof()
            for _reader, writer in silent:
                writer.close()

    uvloop.run(scenario())


def test_plain_text_and_a_broken_handshake_are_closed_and_others_served(
    certificates: Path,
) -> None:
    async def scenario() -> None:
        async with listening(certificates, Connections(10)) as port:
            for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x02\x01\x00"):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(sent)
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 20)
                writer.close()
            assert await is_echoed(certificates, port)

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        (None, "server.key", "--ssl-keyfile needs --ssl-certfile"),
        ("missing.pem", "server.key", "No such file"),
        ("server.pem", "missing.key", "No such file"),
        ("server.pem", None, "cannot serve with"),
        ("authority.pem", "server.key", "cannot serve with"),
        ("server.key", "server.key", "cannot serve with"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    certificates: Path, certificate: str | None, key: str | None, message: str
) -> None:
    settings = Settings(
        ssl_certfile=None if certificate is None else certificates / certificate,
        ssl_keyfile=None if key is None else certificates / key,
    )
    with pytest.raises(CannotUseCertificate, match=message):
        check_certificate(settings)
