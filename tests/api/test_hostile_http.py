"""Requests that no honest client sends: answered as documented, or the connection is closed.

The server answers the next request after each of them.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from loraplex.api.contract.error_codes import ERROR_CODES
from loraplex.api.http.head import MAX_HEAD_BYTES
from loraplex.api.http.protocol import HEAD_SECONDS
from support.server import Caller, ServerUnderTest

MIB = 1 << 20
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error["request_id"] == self.headers["x-request-id"]
        assert ERROR_CODES[error["code"]].status == self.status
        return str(error["code"])


class Line:
    """A connection to the server, of which every byte is ours."""

    def __init__(self, server: ServerUnderTest) -> None:
        url = httpx.URL(server.url)
        self.socket = socket.create_connection((url.host, url.port or 0), timeout=30)
        self.stream = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, *, has_body: bool = True) -> Answer | None:
        """The next answer; None once the server has closed."""
        try:
            status = self.stream.readline()
            if not status:
                return None
            headers: dict[str, str] = {}
            while line := self.stream.readline().strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            length = int(headers.get("content-length", 0)) if has_body else 0
            body = self.stream.read(length)
        except ConnectionResetError:
            return None
        return Answer(int(status.split()[1]), headers, body)

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


@pytest.fixture
def line(server: ServerUnderTest) -> Iterator[Line]:
    """A new connection; afterwards the server still serves."""
    with closing(Line(server)) as opened:
        yield opened
    assert httpx.get(f"{server.url}/ready").status_code == 200


def request(
    target: str, *headers: str, method: str = "GET", key: str = "", body: bytes = b""
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append("Host: x")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def post(key: str, body: bytes, *headers: str, target: str = "/v1/chat/completions") -> bytes:
    kind = () if any("ontent-" in h for h in headers) else ("Content-Type: application/json",)
    return request(target, *kind, *headers, method="POST", key=key, body=body)


HOSTS = ["a/?x=", "a/v1/models#", "[::1", "evil.example\\@x", "x:99999999", "", "x x", "/../../"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("target", ["/v1/models", "/v1/adapters/bot"])
def test_what_is_no_host_is_refused(line: Line, host: str, target: str) -> None:
    line.send(request(target, f"Host: {host}"))
    answer = line.read()
    assert answer is not None
    assert answer.code == "malformed_request"


TARGETS = [
    ("http://x/v1/models", "missing_api_key"),
    ("http://evil.example/v1/models", "malformed_request"),
    ("http://x@y/v1/models", "malformed_request"),
    ("//v1/models", "not_found"),
    ("//x/v1/models", "not_found"),
    ("/v1//models", "not_found"),
    ("/v1/%6dodels", "missing_api_key"),
    ("/%76%31/models", "missing_api_key"),
    ("/v1/./models", "not_found"),
    ("/v1/../v1/models", "not_found"),
    ("/health/../v1/models", "not_found"),
    ("/health/%2e%2e/v1/models", "not_found"),
    ("/health%2f..%2fv1/models", "not_found"),
    ("/health;/v1/models", "not_found"),
    ("/v1/models;x=/health", "not_found"),
    ("/v1/models%00", "not_found"),
    ("/v1/models%0d%0aX:y", "not_found"),
    ("/v1/models#/health", "malformed_request"),
    ("/v1/models%23", "not_found"),
    ("/v1/models?/health", "missing_api_key"),
    ("/v1/models%3f", "not_found"),
    ("/V1/models", "not_found"),
    ("/v1/models/", "missing_api_key"),
    ("/v1/models/%2e%2e%2fhealth", "missing_api_key"),
    ("/v1/adapters/%2e%2e/versions/1", "missing_api_key"),
    ("/v1/adapters/..%2f..%2fx", "not_found"),
    ("/v1/adapters/%ff%fe", "missing_api_key"),
    ("/v1/adapters/%c0%ae", "missing_api_key"),
    ("/v1/adapters/%", "missing_api_key"),
    ("/v1/adapters/%zz", "missing_api_key"),
    ("*", "malformed_request"),
    ("v1/models", "malformed_request"),
    ("/v1/mod els", "malformed_request"),
    ("/v1/modèls", "malformed_request"),
    ("http:///v1/models", "malformed_request"),
    ("http://x", "malformed_request"),
]


@pytest.mark.parametrize(("target", "code"), TARGETS)
def test_no_spelling_of_a_path_opens_a_closed_route(line: Line, target: str, code: str) -> None:
    line.send(request(target))
    answer = line.read()
    assert answer is not None
    assert answer.code == code


@pytest.mark.parametrize("target", [target for target, _ in TARGETS])
def test_no_spelling_of_a_path_fails_a_caller_with_a_key(
    line: Line, resident: Caller, target: str
) -> None:
    line.send(request(target, key=resident.key))
    answer = line.read()
    assert answer is not None
    assert answer.status < 500
    if answer.status != 200:
        assert answer.code


def test_two_keys_are_no_key_whatever_their_order(
    server: ServerUnderTest, resident: Caller
) -> None:
    good, bad = f"Authorization: Bearer {resident.key}", "Authorization: Bearer x"
    for headers in ((good, bad), (bad, good), (good, good)):
        with closing(Line(server)) as line:
            line.send(request("/v1/models", *headers))
            answer = line.read()
        assert answer is not None
        assert answer.code == "malformed_request"


@pytest.mark.parametrize(
    "credentials",
    [
        "Bearer  {key}\t",
        "bearer {key}",
        "BEARER {key}",
    ],
)
def test_the_scheme_of_a_key_is_not_written_in_stone(
    line: Line, resident: Caller, credentials: str
) -> None:
    line.send(request("/v1/models", f"Authorization: {credentials.format(key=resident.key)}"))
    answer = line.read()
    assert answer is not None
    assert answer.status == 200


@pytest.mark.parametrize(
    "credentials",
    ["Bearer {key},{key}", "Bearer {key} x", "Bearer \xa0{key}", "Token {key}", "Bearer {key}\x01"],
)
def test_what_is_around_a_key_makes_it_none(line: Line, resident: Caller, credentials: str) -> None:
    line.send(request("/v1/models", f"Authorization: {credentials.format(key=resident.key)}"))
    answer = line.read()
    assert answer is not None
    assert answer.code in {"invalid_api_key", "malformed_request"}


MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA\x00B: c\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"\xff\xfe\x00" * 100,
]


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_not_http_is_refused_and_the_line_closed(line: Line, data: bytes) -> None:
    line.send(data)
    answer = line.read()
    assert answer is not None
    assert answer.code == "malformed_request"
    assert answer.headers["connection"] == "close"
    assert line.read() is None


@pytest.mark.parametrize(
    "encoding", ["gzip, chunked", "chunked, chunked", "identity", "xchunked", "chunked, identity"]
)
def test_a_transfer_encoding_that_is_not_chunked_is_refused(line: Line, encoding: str) -> None:
    line.send(post("x", b"", f"Transfer-Encoding: {encoding}", "Content-Type: application/json"))
    line.send(b"0\r\n\r\n")
    answer = line.read()
    assert answer is not None
    assert answer.code in {"malformed_request", "invalid_api_key"}


@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_a_head_beyond_its_limit_is_refused(line: Line, is_in_one_piece: bool) -> None:
    padding = b"A" * (MAX_HEAD_BYTES + 1)
    if is_in_one_piece:
        line.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + padding + b"\r\n\r\n")
    else:
        line.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        for start in range(0, len(padding), 1000):
            line.send(b"X: " + padding[start : start + 1000] + b"\r\n")
    answer = line.read()
    assert answer is not None
    assert answer.code == "headers_too_large"
    assert line.read() is None


def test_a_line_without_end_is_refused(line: Line) -> None:
    line.send(b"GET /" + b"a" * (MAX_HEAD_BYTES + 1))
    answer = line.read()
    assert answer is not None
    assert answer.code == "headers_too_large"


def test_large_heads_that_are_allowed_are_read(line: Line, resident: Caller) -> None:
    line.send(request("/v1/models", f"X: {'a' * (MAX_HEAD_BYTES - 1000)}", key=resident.key))
    answer = line.read()
    assert answer is not None
    assert answer.status == 200


@pytest.mark.slow
def test_slow_senders_are_given_up_and_hinder_nobody(
    server: ServerUnderTest, resident: Caller
) -> None:
    """Four kinds at once: a head that trickles, one that stops, a silent line, a second request."""
    ends: dict[str, str | None] = {}

    def trickle(name: str, *, first: bytes, then: bytes, num_answers: int) -> None:
        with closing(Line(server)) as line:
            line.send(first)
            for _ in range(num_answers):
                answer = line.read()
                assert answer is not None
                assert answer.status == 200
            line.socket.settimeout(1)
            for _ in range(round(HEAD_SECONDS) + 5):
                try:
                    line.send(then)
                    answer = line.read()
                except TimeoutError:
                    line.stream = line.socket.makefile("rb")
                    continue
                except OSError:
                    ends[name] = None
                    return
                ends[name] = None if answer is None else answer.code
                return

    begun = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    whole = request("/health")
    senders = {
        "trickle": (begun, b"X: y\r\n", 0),
        "stop": (begun, b"", 0),
        "silent": (b"", b"", 0),
        "second": (whole + b"G", b"", 1),
    }
    threads = [
        threading.Thread(
            target=trickle,
            args=(name,),
            kwargs={"first": first, "then": then, "num_answers": num_answers},
        )
        for name, (first, then, num_answers) in senders.items()
    ]
    for thread in threads:
        thread.start()
    assert resident.http.get("/v1/models").status_code == 200
    for thread in threads:
        thread.join()
    late = "request_timeout"
    assert ends == {"trickle": late, "stop": late, "silent": None, "second": late}


def test_a_chunked_body_without_end_is_cut_at_the_limit(line: Line, resident: Caller) -> None:
    head = post(resident.key, b"", "Transfer-Encoding: chunked", "Content-Type: application/json")
    line.send(head)
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(4 * MIB // 0x10000 + 2):
        line.send(chunk)
    answer = line.read()
    assert answer is not None
    assert answer.code == "body_too_large"


def test_requests_in_one_piece_are_answered_in_their_order(line: Line, resident: Caller) -> None:
    targets = ["/health", "/v1/models", "/v1/nothing", "/v1/base", "/ready"] * 4
    line.send(b"".join(request(target, key=resident.key) for target in targets))
    answers = [line.read() for _ in targets]
    assert [answer and answer.status for answer in answers] == [200, 200, 404, 200, 200] * 4
    ids = {answer.headers["x-request-id"] for answer in answers if answer}
    assert len(ids) == len(targets)


def test_a_request_smuggled_into_a_body_is_a_body(line: Line, resident: Caller) -> None:
    inner = request("/v1/models", key=resident.key)
    line.send(post("", inner) + request("/health"))
    answers = [line.read(), line.read()]
    assert [answer and answer.status for answer in answers] == [401, 200]


BODIES = [
    (b'{"model": "tiny", "temperature": NaN}', "invalid_parameter"),
    (b'{"model": "tiny", "temperature": 1e999}', "invalid_parameter"),
    (b'{"model": "tiny", "temperature": -1e999}', "invalid_parameter"),
    (b'{"model": "tiny", "max_tokens": 1e2}', "invalid_parameter"),
    (b'{"model": "tiny", "max_tokens": 1' + b"0" * 5000 + b"}", "invalid_json"),
    (b'{"model": "tiny", "seed": 1' + b"0" * 400 + b"}", "invalid_parameter"),
    (b'{"model": "a", "model": "tiny"}', "invalid_parameter"),
    (b'{"__proto__": {}, "model": "tiny"}', "invalid_parameter"),
    (b"[" * (2 * MIB) + b"]" * (2 * MIB), "body_too_large"),
    (b"[" * 90_000, "invalid_json"),
    (b'{"a":' * 90_000, "invalid_json"),
    (b'{"a":' * (MIB // 2), "body_too_large"),
    (b"[" + b"{}," * MIB + b"{}]", "body_too_large"),
    (b'["' + b"[{" * MIB + b'"]', "invalid_parameter"),
    (b'["' + b'\\"[{' * (MIB - 9) + b'"]', "invalid_parameter"),
    (b"[" + b"0," * (2 * MIB - 8) + b"0]", "invalid_parameter"),
    (b'"' + b"\\u0000" * 1000 + b'"', "invalid_parameter"),
    (b"\xef\xbb\xbf{}", "invalid_json"),
    (b'{"model": "\xed\xa0\x80"}', "invalid_json"),
    ('{"model": "tiny"}'.encode("utf-16"), "invalid_json"),
    (b"model=tiny", "invalid_json"),
    (b"null", "invalid_parameter"),
    (b"\x00", "invalid_json"),
]


@pytest.mark.parametrize(("body", "code"), BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_bombs_or_nonsense_are_refused(
    line: Line, resident: Caller, body: bytes, code: str
) -> None:
    line.send(post(resident.key, body))
    answer = line.read()
    assert answer is not None
    assert answer.code == code


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity", "x"])
def test_packed_bodies_are_not_unpacked(line: Line, resident: Caller, encoding: str) -> None:
    line.send(
        post(resident.key, b"{}", "Content-Type: application/json", f"Content-Encoding: {encoding}")
    )
    answer = line.read()
    assert answer is not None
    assert answer.code == "unsupported_media_type"


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "text/json",
        "application/json, text/plain",
        "application/jsonp",
        "*/*",
        "",
    ],
)
def test_bodies_of_other_types_are_refused(line: Line, resident: Caller, kind: str) -> None:
    line.send(post(resident.key, json.dumps(CHAT).encode(), f"Content-Type: {kind}"))
    answer = line.read()
    assert answer is not None
    assert answer.code == "unsupported_media_type"


@pytest.mark.parametrize(
    "header",
    [
        "X-HTTP-Method-Override: DELETE",
        "X-Method-Override: DELETE",
        "X-HTTP-Method: DELETE",
        "X-Original-URL: /v1/base",
        "X-Rewrite-URL: /v1/base",
        "X-Forwarded-Prefix: /v1/base",
    ],
)
def test_no_header_changes_the_method_or_the_path(
    line: Line, resident: Caller, header: str
) -> None:
    line.send(request("/v1/adapters/bot?_method=DELETE", header, key=resident.key))
    answer = line.read()
    assert answer is not None
    assert answer.status == 200
    assert json.loads(answer.body)["name"] == "bot"


@pytest.mark.parametrize(
    "method", ["TRACE", "CONNECT", "OPTIONS", "HEAD", "PROPFIND", "PATCH", "QUERY"]
)
def test_other_methods_are_refused(line: Line, resident: Caller, method: str) -> None:
    line.send(request("/v1/models", method=method, key=resident.key))
    answer = line.read(has_body=method != "HEAD")
    assert answer is not None
    assert answer.status in {400, 405}
    if method != "HEAD":
        assert answer.code in {"method_not_allowed", "malformed_request"}


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "TLS/1.0"])
def test_no_upgrade_is_taken(line: Line, resident: Caller, protocol: str) -> None:
    line.send(
        request(
            "/v1/models",
            "Connection: Upgrade",
            f"Upgrade: {protocol}",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
            key=resident.key,
        )
    )
    answer = line.read()
    assert answer is not None
    assert answer.status == 200


def test_memory_stays_bounded_under_many_bombs(server: ServerUnderTest, resident: Caller) -> None:
    """64 bodies of 4 MiB at once: with a key 600 MB at most, without one they are not kept."""
    bomb = b"[" + b"[]," * ((4 * MIB - 2) // 3 - 1) + b"[]]"
    for key, limit in (("", 20 * MIB), (resident.key, 600 * MIB)):
        before = resident_bytes(server)
        statuses: list[int | None] = []

        def send(key: str = key, statuses: list[int | None] = statuses) -> None:
            with closing(Line(server)) as line:
                line.send(post(key, bomb))
                answer = line.read()
                statuses.append(answer and answer.status)

        threads = [threading.Thread(target=send) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [413 if key else 401] * 64
        assert peak_bytes(server) - before <= limit
        assert httpx.get(f"{server.url}/ready").status_code == 200


def resident_bytes(server: ServerUnderTest) -> int:
    """What the API's process holds now; its peak is counted from here on."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    return _status_bytes(server, "VmRSS")


def peak_bytes(server: ServerUnderTest) -> int:
    return _status_bytes(server, "VmHWM")


def _status_bytes(server: ServerUnderTest, name: str) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
