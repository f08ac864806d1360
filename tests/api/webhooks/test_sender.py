"""The sender connects to checked addresses only, and waits for nobody longer than it has to."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from loraplex.api.webhooks.sender import Answered, Sender, resolve
from loraplex.platform.networks import Address
from loraplex.platform.webhooks.event_types import Failure
from loraplex.platform.webhooks.target import TargetPolicy, parse_allowed_host
from support.webhooks import (
    GIANT_HEADERS,
    Receiver,
    Respond,
    answer,
    drip,
    flood,
    never_answer,
    receiving,
)

LOOPBACK = (ip_network("127.0.0.0/8"),)
SECONDS = 1.0


class Resolver:
    """Answers with these addresses, one list after another."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[Address]:
        self.asked.append(host)
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [ip_address(address) for address in found]


LOCAL = ("127.0.0.1",)


def send(
    receiver: Receiver,
    authority: Path,
    path: str = "/",
    *,
    resolver: Resolver | None = None,
    is_local_allowed: bool = True,
    url: str | None = None,
    hosts: Sequence[str] = ("localhost", "rebound.example"),
) -> Answered:
    policy = TargetPolicy(
        tuple(parse_allowed_host(f"{host}:{receiver.port}") for host in hosts),
        LOOPBACK if is_local_allowed else (),
    )
    context = ssl.create_default_context(cafile=authority / "authority.pem")
    sender = Sender(policy, context, resolve=resolver or Resolver(LOCAL), seconds=SECONDS)
    return asyncio.run(sender.post(url or receiver.url(path), {"x-test": "1"}, b'{"id": "e"}'))


def test_a_body_arrives_with_its_headers_and_the_name(receiver: Receiver, authority: Path) -> None:
    assert send(receiver, authority, "/in?a=b") == Answered(204, None)
    request = receiver.received[-1]
    assert (request.path, request.body) == ("/in?a=b", b'{"id": "e"}')
    assert request.headers["x-test"] == "1"
    assert request.headers["host"] == f"localhost:{receiver.port}"


def test_a_connection_needs_an_allowed_address(receiver: Receiver, authority: Path) -> None:
    before = len(receiver.received)
    answered = send(receiver, authority, is_local_allowed=False)
    assert answered == Answered(None, Failure.ADDRESS_NOT_ALLOWED)
    for addresses in (
        ("169.254.169.254",),
        ("::ffff:127.0.0.1",),
        ("127.0.0.1", "10.0.0.1"),
        ("8.8.8.8", "10.0.0.1"),
        ("fe80::1",),
    ):
        answered = send(receiver, authority, resolver=Resolver(addresses))
        assert answered == Answered(None, Failure.ADDRESS_NOT_ALLOWED), addresses
    assert len(receiver.received) == before


def test_a_name_is_resolved_once_and_the_connection_keeps_its_address(
    receiver: Receiver, authority: Path
) -> None:
    """DNS rebinding: the second answer is another address than the one that was checked."""
    resolver = Resolver(LOCAL, ("10.0.0.1",))
    assert send(receiver, authority, resolver=resolver) == Answered(204, None)
    assert resolver.asked == ["localhost"]
    answered = send(receiver, authority, resolver=resolver)
    assert answered == Answered(None, Failure.ADDRESS_NOT_ALLOWED)


def test_the_certificate_has_to_be_that_of_the_name(
    receiver: Receiver, authority: Path, tmp_path: Path
) -> None:
    url = f"https://rebound.example:{receiver.port}/"
    assert send(receiver, authority, url=url) == Answered(None, Failure.CERTIFICATE_INVALID)
    with receiving(tmp_path / "other") as other:  # of an authority that nobody knows
        assert send(other, authority) == Answered(None, Failure.CERTIFICATE_INVALID)


def test_a_host_that_is_no_longer_listed_is_refused(receiver: Receiver, authority: Path) -> None:
    answered = send(receiver, authority, hosts=["hooks.example"])
    assert answered == Answered(None, Failure.HOST_NOT_ALLOWED)
    for url in ("http://localhost/", "https://127.0.0.1/", "https://u@localhost/", "x"):
        assert send(receiver, authority, url=url) == Answered(None, Failure.HOST_NOT_ALLOWED)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 200 OK", Answered(200, None)),
        (b"HTTP/1.1 299 Fine", Answered(299, None)),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted", Answered(202, None)),
        (b"HTTP/1.1 301 Moved\r\nlocation: {url}", Answered(301, Failure.REDIRECT)),
        (b"HTTP/1.1 302 Found\r\nlocation: /other", Answered(302, Failure.REDIRECT)),
        (b"HTTP/1.1 307 Go\r\nlocation: https://10.0.0.1/", Answered(307, Failure.REDIRECT)),
        (b"HTTP/1.1 308 Go\r\nlocation: file:///etc/passwd", Answered(308, Failure.REDIRECT)),
        (b"HTTP/1.1 304 Not Modified", Answered(304, Failure.REDIRECT)),
        (b"HTTP/1.1 400 Bad", Answered(400, Failure.STATUS)),
        (b"HTTP/1.1 401 No\r\nwww-authenticate: Basic", Answered(401, Failure.STATUS)),
        (b"HTTP/1.1 410 Gone", Answered(410, Failure.GONE)),
        (b"HTTP/1.1 500 Sorry", Answered(500, Failure.STATUS)),
        (b"HTTP/1.1 503 Busy\r\nretry-after: 120", Answered(503, Failure.STATUS, 120)),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999", Answered(200, None)),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz", Answered(200, None)),
        (b"SSH-2.0-OpenSSH_9.9", Answered(None, Failure.ANSWER_INVALID)),
        (b"HTTP/1.1 abc", Answered(None, Failure.ANSWER_INVALID)),
        (b"HTTP/1.1 200 OK\r\nbad header", Answered(None, Failure.ANSWER_INVALID)),
        (b"", Answered(None, Failure.ANSWER_INVALID)),
    ],
    ids=lambda value: value[:30].decode() if isinstance(value, bytes) else None,
)
def test_an_answer_is_judged_by_its_status(
    receiver: Receiver, authority: Path, head: bytes, expected: Answered
) -> None:
    before = len(receiver.received)
    receiver.respond["/judged"] = answer(head.replace(b"{url}", receiver.url("/other").encode()))
    assert send(receiver, authority, "/judged") == expected
    assert [each.path for each in receiver.received[before:]] == ["/judged"]


@pytest.mark.parametrize(
    ("respond", "expected"),
    [
        (never_answer, Answered(None, Failure.TIMEOUT)),
        (drip, Answered(None, Failure.TIMEOUT)),
        (flood, Answered(200, None)),
        (GIANT_HEADERS, Answered(None, Failure.ANSWER_INVALID)),
    ],
    ids=["silent", "dripping", "endless", "giant headers"],
)
def test_a_bad_receiver_is_left_in_time(
    receiver: Receiver, authority: Path, respond: Respond, expected: Answered
) -> None:
    receiver.respond["/bad"] = respond
    began_at = time.monotonic()
    assert send(receiver, authority, "/bad") == expected
    assert time.monotonic() - began_at < SECONDS + 4


def test_an_address_without_a_listener_is_passed_over(receiver: Receiver, authority: Path) -> None:
    assert send(receiver, authority, resolver=Resolver(("127.0.0.2", "127.0.0.1"))).status == 204
    answered = send(receiver, authority, resolver=Resolver(("127.0.0.2",)))
    assert answered == Answered(None, Failure.CONNECTION_FAILED)


def test_a_name_without_addresses_is_not_resolved(receiver: Receiver, authority: Path) -> None:
    def fail(host: str, port: int) -> list[Address]:
        raise OSError("no such name")

    policy = TargetPolicy((parse_allowed_host("localhost"),), LOOPBACK)
    sender = Sender(policy, ssl.create_default_context(), resolve=fail)
    answered = asyncio.run(sender.post("https://localhost/", {}, b""))
    assert answered == Answered(None, Failure.NAME_NOT_RESOLVED)


def test_a_slow_name_is_a_timeout_and_keeps_its_place_until_it_is_resolved() -> None:
    is_over = threading.Event()

    def wait(host: str, port: int) -> list[Address]:
        is_over.wait(30)
        return [ip_address("127.0.0.1")]

    async def measure() -> tuple[bool, Answered]:
        policy = TargetPolicy((parse_allowed_host("localhost"),), LOOPBACK)
        sender = Sender(policy, ssl.create_default_context(), resolve=wait, seconds=0.05)
        post = asyncio.create_task(sender.post("https://localhost/", {}, b""))
        await asyncio.sleep(0.3)
        is_early = post.done()
        is_over.set()
        return is_early, await post

    assert asyncio.run(measure()) == (False, Answered(None, Failure.TIMEOUT))


def test_the_system_resolves_names() -> None:
    assert any(address.is_loopback for address in resolve("localhost", 443))
