"""The corpus of requests that try to bypass a rule, sent directly, as a proxy, and through two."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from loraplex.platform.accounts.failures import MAX_FAILURES
from loraplex.platform.audit.models import AuditEntry, PlatformAuditEntry
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.secrets import API_KEY_PEPPER
from support import proxies
from support.http_corpus import (
    BOUND_TO,
    CASES,
    HOST,
    INNER_ANSWER,
    JSON,
    MALFORMED,
    NO_KEY,
    OK,
    Case,
    chunked,
    request,
)
from support.server import FAKE_ENGINE, ServerUnderTest, serving
from support.tools import need_program

pytestmark = pytest.mark.slow

STRANGER, OF_PROXY, OF_HAPROXY, OF_NGINX = (f"127.0.0.{number}" for number in (2, 3, 4, 5))
"""Where callers call from: past every proxy, and through each."""
OTHERS = request("GET /v1/adapters", "Authorization: Bearer OPERATOR", "Connection: close")
OTHERS_ANSWER = "tenant_required"
"""What a request gets that has nothing to do with a case, and no case that passed a rule."""
NOT_HTTP = "not HTTP/1.1"
SILENCE_SECONDS = 8.0


@dataclass(frozen=True)
class Gate:
    """A server with rules about addresses and hosts, and keys of its one tenant."""

    server: ServerUnderTest
    words: dict[bytes, bytes]

    @property
    def port(self) -> int:
        return httpx.URL(self.server.url).port or 0

    def concrete(self, data: bytes) -> bytes:
        for word, value in self.words.items():
            data = re.sub(rb"\b%b\b" % word, value, data)
        return data

    def num_inner(self) -> int:
        """Requests that were answered with `INNER_ANSWER`."""
        metrics = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        name = "loraplex_http_requests_total{"
        counts = [line for line in metrics if line.startswith(name) and f'"{INNER_ANSWER}"' in line]
        return sum(round(float(line.split()[-1])) for line in counts)


@pytest.fixture(scope="module")
def gate(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    rules = {
        "LORAPLEX_TRUSTED_PROXIES": f"{proxies.ADDRESS}/32",
        "LORAPLEX_ALLOWED_HOSTS": f"{HOST},localhost",
    }
    folder = tmp_path_factory.mktemp("gate")
    with serving(tiny_base, folder, engine=FAKE_ENGINE, **rules) as server:
        caller = server.make_caller("acme")
        service = ApiKeyService(Keyring(server.settings.load_secrets(), API_KEY_PEPPER))
        database = server.database
        with database.transaction(caller.tenant_id) as session:
            bound = service.issue(
                session, name="bound", scopes=list(Scope), networks=[f"{BOUND_TO}/32"]
            )
        database.close()
        words = {
            "KEY": caller.key,
            "BOUND": bound.text,
            "OPERATOR": server.make_operator("root"),
        }
        yield Gate(server, {word.encode(): value.encode() for word, value in words.items()})


@dataclass(frozen=True)
class Way:
    """A way to the server: to which port, from which address, and what is added to a head."""

    gate: Gate
    port: int
    source: str
    added: bytes = b""

    def answers(self, data: bytes) -> list[str]:
        """The codes of what comes back, and then of one more request on the same connection, if it
        is still open.
        """
        with socket.create_connection(
            ("127.0.0.1", self.port), timeout=SILENCE_SECONDS, source_address=(self.source, 0)
        ) as connection:
            connection.sendall(self._concrete(data))
            received = connection.recv(1 << 16)
            with suppress(OSError):
                connection.sendall(self._concrete(OTHERS))
                while more := connection.recv(1 << 16):
                    received += more
        return list(codes(received))

    def _concrete(self, data: bytes) -> bytes:
        return self.gate.concrete(data.replace(b"\r\n\r\n", b"\r\n%b\r\n" % self.added, 1))


def codes(received: bytes) -> Iterator[str]:
    """Of each answer: `OK`, the code of an error of ours, or a proxy's own status."""
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.[01] (\d+)", head)
        length = re.search(rb"(?mi)^content-length: *(\d+)\r?$", head)
        if status is None or (length is None and int(status[1]) >= 200):
            yield NOT_HTTP
            return
        size = int(length[1]) if length else 0
        body, received = rest[:size], rest[size:]
        if int(status[1]) >= 300:
            yield json.loads(body)["error"]["code"] if body.startswith(b"{") else status[1].decode()
        elif int(status[1]) >= 200:
            yield OK


PROXIED = ["as a proxy", "haproxy", "nginx"]


@pytest.fixture(params=["direct", *PROXIED])
def way(request: pytest.FixtureRequest, gate: Gate, tmp_path: Path) -> Iterator[Way]:
    """How a caller's bytes come to the server."""
    match request.param:
        case "direct":
            yield Way(gate, gate.port, STRANGER)
        case "as a proxy":  # one that passes on whatever it is sent
            added = f"X-Forwarded-For: {OF_PROXY}\r\nX-Forwarded-Proto: http\r\n".encode()
            yield Way(gate, gate.port, proxies.ADDRESS, added)
        case "haproxy":
            with proxies.haproxy(HAPROXY(), gate.port, tmp_path) as port:
                yield Way(gate, port, OF_HAPROXY)
        case "nginx":
            with proxies.nginx(NGINX(), gate.port, tmp_path) as port:
                yield Way(gate, port, OF_NGINX)


HAPROXY = partial(need_program, "haproxy", "/usr/sbin/haproxy", package="haproxy")
NGINX = partial(need_program, "nginx", "/usr/sbin/nginx", package="nginx-light")


def test_no_case_passes_a_rule_or_brings_a_second_request(way: Way) -> None:
    assert len({case.data for case in CASES}) == len(CASES) >= 100
    is_direct = way.port == way.gate.port
    wrong, num_seen, num_before = [], 0, way.gate.num_inner()
    for case in CASES:
        found = way.answers(case.data)
        num_seen += found.count(INNER_ANSWER)
        is_right = is_exact(case, found) if is_direct else is_no_better(case, found)
        # Over the connections between proxy and server that the case has left:
        if not is_right or not (is_direct or way.answers(OTHERS) == [OTHERS_ANSWER]):
            wrong.append(f"{case.name}: {case.answers} became {found}")
    assert not wrong, "\n".join(wrong)
    assert way.gate.num_inner() - num_before == num_seen, "one came that no caller was answered"


def is_exact(case: Case, found: list[str]) -> bool:
    """Its own answers, and then the connection's end or the answer to what was sent after it."""
    return tuple(found) in (case.answers, (*case.answers, OTHERS_ANSWER))


def is_no_better(case: Case, found: list[str]) -> bool:
    """A proxy may refuse what the server would take. It may also mend what the server would refuse,
    and see a second request in it: then it is one, and has its answer. No rule is passed by it.
    """
    allowed = {*case.answers, MALFORMED, NO_KEY, INNER_ANSWER, OTHERS_ANSWER}
    if MALFORMED in case.answers:
        allowed.add(NOT_HTTP)  # HAProxy speaks HTTP/2, nginx HTTP/0.9
        if b"BOUND" not in case.data:
            allowed.add(OK)  # mended; the key is good from anywhere
    return {code for code in found if not code.isdigit()} <= allowed


@pytest.mark.parametrize("way", PROXIED, indirect=True)
def test_failures_to_sign_in_lock_the_address_that_they_came_from(way: Way) -> None:
    """Not the one that each of them names."""
    found = []
    for number in range(MAX_FAILURES + 2):
        invented = f"203.0.113.{number}"
        body = b'{"name": "nobody-%d", "password": "wrong"}' % number
        line = f"X-Forwarded-For: {invented}"
        data = chunked("POST /v1/session", JSON, line, body=body, trailers=line.encode() + b"\r\n")
        found += way.answers(data.replace(HOST.encode(), b"localhost", 1))[:1]
    assert found == ["sign_in_failed"] * MAX_FAILURES + ["sign_in_locked"] * 2


def test_a_key_that_is_bound_to_a_network_works_from_there(gate: Gate) -> None:
    """The rule that the corpus cannot pass is one that can be kept."""
    way = Way(gate, gate.port, BOUND_TO)
    assert way.answers(request("GET /v1/models", "Authorization: Bearer BOUND")) == [
        OK,
        OTHERS_ANSWER,
    ]


def test_the_audit_log_has_no_address_that_nobody_called_from(gate: Gate) -> None:
    """Written out when the server ends, and so the last."""
    gate.server.process.terminate()
    gate.server.process.wait(60)
    database = gate.server.database
    with database.platform_transaction(read_only=True) as session:
        rows = [AuditEntry.address, PlatformAuditEntry.address]
        found = {address for row in rows for address in session.scalars(select(row))}
    database.close()
    callers = {STRANGER, OF_PROXY, OF_HAPROXY, OF_NGINX, proxies.ADDRESS, BOUND_TO}
    assert found - {None} <= callers
    assert {STRANGER, OF_PROXY} <= found
