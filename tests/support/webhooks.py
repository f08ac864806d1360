"""A receiver of webhooks: an HTTPS server on the loopback interface, under its own authority."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loraplex.platform.webhooks.service import WebhookService
from loraplex.platform.webhooks.signing import SigningSecrets
from support.server import Caller, ServerUnderTest

Respond = Callable[["Received", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Receiver:
    """What the server has received, and how it answers."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    respond: dict[str, Respond] = field(default_factory=dict)
    """By path; the others are answered with 204."""

    def url(self, path: str = "/") -> str:
        return f"https://localhost:{self.port}{path}"

    def events_at(self, path: str) -> list[dict[str, Any]]:
        """The events that have arrived at this path, each once."""
        events = {each.event["id"]: each.event for each in self.received if each.path == path}
        return list(events.values())


def add_webhook(server: ServerUnderTest, caller: Caller, url: str = "https://a.example/") -> str:
    """A webhook's id, whatever the server's operator allows."""
    webhooks = WebhookService(SigningSecrets(server.settings.load_secrets()))
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        issued = webhooks.create(
            session, url=url, events=None, description=None, created_by="key:test"
        )
    database.close()
    return issued.endpoint.id


def answer(head: bytes, body: bytes = b"") -> Respond:
    """Always the same answer."""

    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"\r\n\r\n" + body)

    return respond


async def never_answer(_: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def drip(_: Received, writer: asyncio.StreamWriter) -> None:
    """A header, one byte at a time."""
    writer.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def flood(_: Received, writer: asyncio.StreamWriter) -> None:
    """A body without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x" * 65536)
        await writer.drain()
        await asyncio.sleep(0.001)  # or the loop would not hear of the connection's end


GIANT_HEADERS = answer(b"HTTP/1.1 200 OK\r\nx-giant: " + b"x" * (1 << 20))


@contextmanager
def receiving(folder: Path, name: str = "localhost") -> Iterator[Receiver]:
    """A server whose certificate is for this name; the authority's is `authority.pem` there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    make_certificates(folder, name)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    receiver = Receiver()
    loop = asyncio.new_event_loop()
    started = threading.Event()
    thread = threading.Thread(target=_run, args=(loop, receiver, context, started), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield receiver
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def _run(
    loop: asyncio.AbstractEventLoop,
    receiver: Receiver,
    context: ssl.SSLContext,
    started: threading.Event,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read(reader)
            receiver.received.append(request)
            respond = receiver.respond.get(request.path, answer(b"HTTP/1.1 204 No Content"))
            await respond(request, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the sender has gone, or the receiver ends
        finally:
            writer.close()

    asyncio.set_event_loop(loop)
    server = loop.run_until_complete(
        asyncio.start_server(serve, "127.0.0.1", receiver.port, ssl=context)
    )
    receiver.port = server.sockets[0].getsockname()[1]
    started.set()
    loop.run_forever()
    server.close()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Received(first.split(" ")[1], headers, body)


def make_certificates(folder: Path, name: str) -> None:
    """An authority's certificate, and that of a server of this name."""
    folder.mkdir(exist_ok=True)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _named("Authority of the tests")
    certificate = (
        _certificate(authority, authority, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False
        )
        .add_extension(_USES, critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    (folder / "authority.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    certificate = (
        _certificate(_named(name), authority, key)
        .add_extension(x509.SubjectAlternativeName([_alternative(name)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


_USES = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )
