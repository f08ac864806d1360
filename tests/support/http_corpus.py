"""Raw requests that try to bypass a rule or to smuggle a second request.

`KEY`, `BOUND` and `OPERATOR` stand for a key that is valid from anywhere, one that is valid only
from `BOUND_TO`, and an operator's. `INNER` is a separate request, the only one that is answered
with `INNER_ANSWER`.
"""

from __future__ import annotations

from typing import NamedTuple

HOST = "loraplex.test"
"""What the server answers for."""
BOUND_TO = "127.0.0.7"
INVENTED = "203.0.113.9"
"""An address that no caller has."""
OK = "ok"
MALFORMED = "malformed_request"
NOT_FROM_HERE = "address_not_allowed"
NOT_PLAIN = "insecure_transport"
NO_KEY = "missing_api_key"
OTHER_HOST = "host_not_allowed"
INNER_ANSWER = "not_found"


class Case(NamedTuple):
    name: str
    data: bytes
    answers: tuple[str, ...]
    """What a caller without a proxy gets, and no more: `OK`, or the code of an error."""


INNER = f"GET /v1/inner HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
CHUNKED = "Transfer-Encoding: chunked"
_SIGN_IN = b'{"name": "nobody", "password": "not the password"}'
_NEW_KEY = b'{"name": "made", "scopes": ["infer"]}'


def request(
    line: str, *headers: str, body: bytes = b"", host: str = HOST, is_sized: bool = True
) -> bytes:
    """A request with a `Host`, and a `Content-Length` if it has a body."""
    lines = [f"{line} HTTP/1.1", f"Host: {host}", *headers]
    if body and is_sized:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunked(line: str, *headers: str, body: bytes = b"{}", trailers: bytes = b"") -> bytes:
    """The same with a body of one chunk, and what follows the last chunk."""
    text = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)
    return request(line, CHUNKED, *headers, body=text, is_sized=False)


JSON = "Content-Type: application/json"


def bound(*headers: str, trailers: bytes = b"") -> bytes:
    return chunked(
        "POST /v1/completions", "Authorization: Bearer BOUND", JSON, *headers, trailers=trailers
    )


def sign_in(*headers: str, trailers: bytes = b"") -> bytes:
    return chunked("POST /v1/session", JSON, *headers, body=_SIGN_IN, trailers=trailers)


def unkeyed(*headers: str, trailers: bytes = b"") -> bytes:
    return chunked("POST /v1/completions", JSON, *headers, trailers=trailers)


def new_key(*headers: str, trailers: bytes = b"") -> bytes:
    return chunked(
        "POST /v1/keys",
        "Authorization: Bearer KEY",
        JSON,
        *headers,
        body=_NEW_KEY,
        trailers=trailers,
    )


def raw(line: str, *headers: str, body: bytes = b"") -> bytes:
    """Exactly these lines."""
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1") + body


ADDRESS_LINES = [
    f"X-Forwarded-For: {BOUND_TO}",
    f"x-forwarded-for: {BOUND_TO}",
    f"X-FORWARDED-FOR:{BOUND_TO}",
    f"X-Forwarded-For:   {BOUND_TO}  ",
    f"X-Forwarded-For: {BOUND_TO}:4711",
    f"X-Forwarded-For: {INVENTED}, {BOUND_TO}",
    f"X-Forwarded-For: {BOUND_TO}, 127.0.0.10",
    f"X-Forwarded-For: [::ffff:{BOUND_TO}]:80",
    f"X-Forwarded-For: {BOUND_TO}\r\nX-Forwarded-For: {BOUND_TO}",
    f"X_Forwarded_For: {BOUND_TO}",
    f"Forwarded: for={BOUND_TO};proto=https",
    f"X-Real-IP: {BOUND_TO}",
    f"X-Client-IP: {BOUND_TO}",
    f"True-Client-IP: {BOUND_TO}",
    f"CF-Connecting-IP: {BOUND_TO}",
    f"X-Original-Forwarded-For: {BOUND_TO}",
]
TRANSPORT_LINES = [
    "X-Forwarded-Proto: https",
    "x-forwarded-proto: HTTPS",
    "X-Forwarded-Proto: http, https",
    "X-Forwarded-Scheme: https",
    "X-Forwarded-Ssl: on",
    "Front-End-Https: on",
    "X-Forwarded-Port: 443",
    "X-Forwarded-Host: localhost",
    "X-Original-Host: localhost",
    "X-Host: localhost",
]
TRAILERS_WITHOUT_EFFECT = [
    "Authorization: Bearer KEY",
    "authorization: bearer KEY",
    "Cookie: __Host-loraplex=x; loraplex_session=x",
    "X-Loraplex-Tenant: acme",
    "Idempotency-Key: x",
    "Expect: 100-continue",
    "Connection: Upgrade\r\nUpgrade: h2c",
    "X-CSRF-Token: x",
    "Origin: http://localhost",
    "X-HTTP-Method-Override: DELETE",
    "X-Original-URL: /v1/inner",
]
MALFORMED_TRAILERS = [
    b"Content-Length: 300\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"X-Forwarded-For : 127.0.0.7\r\n",
    b" X-Forwarded-For: 127.0.0.7\r\n",
    b"X-Forwarded-For\r\n",
    b"X: a\x00b\r\n",
    b"X\x00: a\r\n",
    b"X: a\rX-Forwarded-For: 127.0.0.7\r\n",
    b"X: a\nX-Forwarded-For: 127.0.0.7\r\n",
    b"GET /v1/inner HTTP/1.1\r\n",
]


def _rules() -> list[Case]:
    """What decides about a caller, sent by the caller: in the head, and behind the body."""
    cases = []
    for line in ADDRESS_LINES:
        text = line.encode() + b"\r\n"
        cases += [
            Case(f"trailer {line!r} under a bound key", bound(trailers=text), (NOT_FROM_HERE,)),
            Case(f"header {line!r} under a bound key", bound(line), (NOT_FROM_HERE,)),
        ]
    for line in TRANSPORT_LINES:
        text = line.encode() + b"\r\n"
        cases += [
            Case(f"trailer {line!r} at sign-in", sign_in(trailers=text), (NOT_PLAIN,)),
            Case(f"header {line!r} at sign-in", sign_in(line), (NOT_PLAIN,)),
        ]
    for line in TRAILERS_WITHOUT_EFFECT:
        text = line.encode() + b"\r\n"
        cases.append(Case(f"trailer {line!r} without a key", unkeyed(trailers=text), (NO_KEY,)))
    for text in MALFORMED_TRAILERS:
        cases.append(Case(f"malformed trailer {text!r}", unkeyed(trailers=text), (MALFORMED,)))
    invented = f"X-Forwarded-For: {INVENTED}\r\n".encode()
    return [
        *cases,
        Case("trailer 'Host' at sign-in", sign_in(trailers=b"Host: localhost\r\n"), (NOT_PLAIN,)),
        Case(
            "trailer 'Host' for a host that is not served",
            request(
                "POST /v1/completions",
                CHUNKED,
                host="other.test",
                is_sized=False,
                body=f"0\r\nHost: {HOST}\r\n\r\n".encode(),
            ),
            (OTHER_HOST,),
        ),
        Case(
            "announced trailer",
            bound("Trailer: X-Forwarded-For", "TE: trailers", trailers=invented),
            (NOT_FROM_HERE,),
        ),
        Case(
            "trailer that names an operator's tenant",
            chunked(
                "POST /v1/completions",
                "Authorization: Bearer OPERATOR",
                JSON,
                trailers=b"X-Loraplex-Tenant: acme\r\n",
            ),
            ("tenant_required",),
        ),
        Case("trailer 'X-Forwarded-For' of a change", new_key(trailers=invented), (OK,)),
        Case(
            "trailer 'X-Forwarded-For' twice of a change",
            new_key(trailers=invented + invented),
            (OK,),
        ),
        Case(
            "trailer of one request before the next",
            new_key(trailers=invented) + new_key(trailers=invented),
            (OK, OK),
        ),
        Case("header 'X-Real-IP' of a change", new_key(f"X-Real-IP: {INVENTED}"), (OK,)),
        Case("header 'Forwarded' of a change", new_key(f"Forwarded: for={INVENTED}"), (OK,)),
    ]


def _hosts() -> list[Case]:
    key = "Authorization: Bearer KEY"
    models = "GET /v1/models HTTP/1.1"
    cases = [
        Case(f"host {host!r}", request("GET /v1/models", key, host=host), (MALFORMED,))
        for host in (
            "",
            f"{HOST}, {HOST}",
            f"user@{HOST}",
            f"{HOST}@other.test",
            f"{HOST}/v1",
            f"{HOST}#",
            f"{HOST}?x",
            f"{HOST} other.test",
            f"{HOST}\tother.test",
            f"{HOST}:80:80",
            f"{HOST}:x",
            f"http://{HOST}",
            "[::1",
            "\xff",
        )
    ]
    cases += [
        Case(f"target {target!r}", request(f"GET {target}", key), (MALFORMED,))
        for target in (
            "http://other.test/v1/models",
            f"http://{HOST}:81/v1/models",
            f"http://user@{HOST}/v1/models",
            f"http://{HOST}@other.test/v1/models",
            "http:///v1/models",
            "http:/v1/models",
            f"ftp://{HOST}/v1/models",
            f"{HOST}:80",
            "*",
            "/v1/models#x",
            f"http://{HOST}#/v1/models",
        )
    ]
    return [
        *cases,
        Case("no host", raw(models, key), (MALFORMED,)),
        Case(
            "no host and a target that has it",
            raw(f"GET http://{HOST}/v1/models HTTP/1.1", key),
            (MALFORMED,),
        ),
        Case("two hosts", raw(models, f"Host: {HOST}", "Host: other.test", key), (MALFORMED,)),
        Case(
            "the same host twice", raw(models, f"Host: {HOST}", f"Host: {HOST}", key), (MALFORMED,)
        ),
        Case("space before the host's colon", raw(models, f"Host : {HOST}", key), (MALFORMED,)),
        Case("folded host", raw(models, f"Host: {HOST}", " other.test", key), (MALFORMED,)),
        Case(
            "host in a first line that is folded", raw(models, f" Host: {HOST}", key), (MALFORMED,)
        ),
        Case(
            "a host that is not served",
            request("GET /v1/models", key, host="other.test"),
            (OTHER_HOST,),
        ),
        Case(
            "a served name before another",
            request("GET /v1/models", key, host=f"{HOST}.other.test"),
            (OTHER_HOST,),
        ),
        Case("another port", request("GET /v1/models", key, host=f"{HOST}:81"), (OK,)),
        Case("target with the same host", request(f"GET http://{HOST}/v1/models", key), (OK,)),
        Case("connect", request(f"CONNECT {HOST}:80", key), (MALFORMED,)),
    ]


def _singletons() -> list[Case]:
    twice = [
        ("Authorization: Bearer KEY", "Authorization: Bearer BOUND"),
        ("Authorization: Bearer BOUND", "Authorization: Bearer KEY"),
        ("Authorization: Bearer OPERATOR", "X-Loraplex-Tenant: acme", "X-Loraplex-Tenant: other"),
        ("Authorization: Bearer KEY", "X-Loraplex-Tenant: acme", "x-loraplex-tenant: acme"),
        ("Authorization: Bearer KEY", "Content-Type: application/json", "Content-Type: text/plain"),
        ("Cookie: loraplex_session=a", "Cookie: loraplex_session=b"),
        ("Authorization: Bearer KEY", "Idempotency-Key: a", "Idempotency-Key: b"),
        ("Cookie: loraplex_session=a", "X-CSRF-Token: a", "X-CSRF-Token: b"),
        ("Cookie: loraplex_session=a", "Origin: http://localhost", "Origin: http://other.test"),
    ]
    return [
        Case(f"sent twice: {headers}", request("GET /v1/models", *headers), (MALFORMED,))
        for headers in twice
    ]


def _framing() -> list[Case]:
    """Bodies whose end two readers see in two places."""
    line = "POST /v1/completions"
    rest = b"0\r\n\r\n" + INNER
    heads = [
        ("CL.TE", "Content-Length: 5", CHUNKED),
        ("TE.CL", CHUNKED, "Content-Length: 5"),
        ("CL.TE of length 0", "Content-Length: 0", CHUNKED),
        ("TE, CL in another case", "TRANSFER-ENCODING: CHUNKED", "content-length: 5"),
        ("TE.TE identity", CHUNKED, "Transfer-Encoding: identity"),
        ("TE.TE twice", CHUNKED, CHUNKED),
        ("TE.TE list", "Transfer-Encoding: gzip, chunked"),
        ("TE.TE list, chunked first", "Transfer-Encoding: chunked, identity"),
        ("TE.TE twice in a list", "Transfer-Encoding: chunked, chunked"),
        ("TE unknown", "Transfer-Encoding: xchunked"),
        ("TE quoted", 'Transfer-Encoding: "chunked"'),
        ("TE with parameter", "Transfer-Encoding: chunked;x=y"),
        ("TE empty", "Transfer-Encoding: "),
        ("TE with vertical tab", "Transfer-Encoding: \x0bchunked"),
        ("TE with NUL", "Transfer-Encoding: chunked\x00"),
        ("TE with no-break space", "Transfer-Encoding: \xa0chunked"),
        ("TE with space before the colon", "Transfer-Encoding : chunked"),
        ("TE with tab before the colon", "Transfer-Encoding\t: chunked"),
        ("TE folded", "Transfer-Encoding:", " chunked"),
        ("TE behind a folded line", "X: y", " Transfer-Encoding: chunked"),
        ("TE behind a bare LF", "X: y\nTransfer-Encoding: chunked"),
        ("TE behind a bare CR", "X: y\rTransfer-Encoding: chunked"),
        ("two lengths", "Content-Length: 5", f"Content-Length: {len(rest)}"),
        ("two lengths in a list", f"Content-Length: 5, {len(rest)}"),
        ("the same length twice", "Content-Length: 5", "Content-Length: 5"),
        ("length +5", "Content-Length: +5"),
        ("length -5", "Content-Length: -5"),
        ("length 5 5", "Content-Length: 5 5"),
        ("length 0x5", "Content-Length: 0x5"),
        ("length 5.0", "Content-Length: 5.0"),
        ("length 5e0", "Content-Length: 5e0"),
        ("length of letters", "Content-Length: five"),
        ("length empty", "Content-Length: "),
        ("length beyond 64 bits", "Content-Length: 18446744073709551621"),
        ("length with a space before the colon", "Content-Length : 5"),
        ("length in Arabic digits", "Content-Length: \xd9\xa5"),
    ]
    cases = [
        Case(name, request(line, JSON, *headers, body=rest, is_sized=False), (MALFORMED,))
        for name, *headers in heads
    ]
    old = raw("POST /v1/completions HTTP/1.0", f"Host: {HOST}", CHUNKED, body=rest)
    return [*cases, Case("chunked in HTTP/1.0", old, (MALFORMED,))]


def _chunks() -> list[Case]:
    """Sizes of chunks, and what is around them."""

    def case(name: str, body: bytes, *answers: str) -> Case:
        data = request("POST /v1/completions", JSON, CHUNKED, body=body, is_sized=False)
        return Case(f"chunk: {name}", data, answers)

    end = b"0\r\n\r\n"
    return [
        case("extension", b"2;a=b\r\n{}\r\n" + end, NO_KEY),
        case("quoted extension", b'2;a="b;c"\r\n{}\r\n' + end, NO_KEY),
        case("leading zeros", b"0000002\r\n{}\r\n" + end, NO_KEY),
        case("size in capitals", b"A\r\n" + b" " * 10 + b"\r\n" + end, NO_KEY),
        case("size beyond 64 bits", b"10000000000000002\r\n{}\r\n" + end + INNER, MALFORMED),
        case("size with prefix", b"0x2\r\n{}\r\n" + end + INNER, MALFORMED),
        case("size with sign", b"+2\r\n{}\r\n" + end + INNER, MALFORMED),
        case("negative size", b"-2\r\n{}\r\n" + end + INNER, MALFORMED),
        case("no size", b"\r\n{}\r\n" + end + INNER, MALFORMED),
        case("space before the size", b" 2\r\n{}\r\n" + end + INNER, MALFORMED),
        case("space behind the size", b"2 \r\n{}\r\n" + end + INNER, MALFORMED),
        case("underscore", b"1_0\r\n{}\r\n" + end + INNER, MALFORMED),
        case("size ended by LF", b"2\n{}\r\n" + end + INNER, MALFORMED),
        case("size ended by CR", b"2\r{}\r\n" + end + INNER, MALFORMED),
        case("data ended by LF", b"2\r\n{}\n" + end + INNER, MALFORMED),
        case("data without end", b"2\r\n{}" + end + INNER, MALFORMED),
        case("data longer than its size", b"1\r\n{}\r\n" + end + INNER, MALFORMED),
        case("extension with LF", b"2;a\n{}\r\n" + end + INNER, MALFORMED),
        case("extension with CR", b"2;a\rb\r\n{}\r\n" + end + INNER, MALFORMED),
        case("extension with NUL", b"2;a\x00b\r\n{}\r\n" + end + INNER, MALFORMED),
    ]


def _lines() -> list[Case]:
    """Request lines, ends of lines, names and values."""
    key = "Authorization: Bearer KEY"
    get = "GET /v1/models HTTP/1.1"
    cases = [
        Case(f"line {line!r}", raw(line, f"Host: {HOST}", key), (MALFORMED,))
        for line in (
            "GET /v1/models",
            "GET /v1/models HTTP/0.9",
            "GET /v1/models HTTP/2.0",
            "GET /v1/models HTTP/1.2",
            "GET /v1/models HTTP/11",
            "GET /v1/models HTTP/1.1 ",
            "GET /v1/models http/1.1",
            "GET\t/v1/models HTTP/1.1",
            "GET /v1/models x HTTP/1.1",
            "GET /v1/models\x00 HTTP/1.1",
            "G\x00ET /v1/models HTTP/1.1",
            "get /v1/models HTTP/1.1",
            " GET /v1/models HTTP/1.1",
            "PRI * HTTP/2.0",
        )
    ]
    cases += [
        Case(f"header line {line!r}", raw(get, f"Host: {HOST}", line, key), (MALFORMED,))
        for line in (
            "A\x00: b",
            "A: b\x00",
            "A: b\x01",
            "A: b\x7f",
            "A B: c",
            ": b",
            "A",
            "A(: b",
            "A\xe9: b",
            f"A: b\nX-Forwarded-For: {BOUND_TO}",
            f"A: b\rX-Forwarded-For: {BOUND_TO}",
            " folded: b",
        )
    ]
    return [
        *cases,
        Case(
            "lines ended by LF", f"GET /v1/models HTTP/1.1\nHost: {HOST}\n\n".encode(), (MALFORMED,)
        ),
        Case(
            "head ended by LF",
            f"GET /v1/models HTTP/1.1\r\nHost: {HOST}\r\n\n".encode(),
            (MALFORMED,),
        ),
        Case("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", (MALFORMED,)),
        Case("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, (MALFORMED,)),
        Case("an empty line first", b"\r\n" + request("GET /v1/models", key), (OK,)),
        Case("two spaces before the target", request("GET  /v1/models", key), (OK,)),
    ]


def _several() -> list[Case]:
    """Requests in one packet, and a request within another."""
    key = "Authorization: Bearer KEY"
    models = request("GET /v1/models", key)
    sized = request("POST /v1/completions", JSON, body=INNER)
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    return [
        Case("three in one packet", models * 3, (OK, OK, OK)),
        Case("one as the body of another", sized, (NO_KEY,)),
        Case(
            "one as a chunk of another",
            chunked("POST /v1/completions", JSON, body=INNER),
            (NO_KEY,),
        ),
        Case("one as the body of a GET", request("GET /v1/models", key, body=INNER), (OK,)),
        Case(
            "one as the body of a HEAD",
            request("OPTIONS /v1/models", key, body=INNER),
            ("method_not_allowed",),
        ),
        Case("behind nonsense", models + b"\0\0\0\0\r\n\r\n" + INNER, (OK,)),
        Case("behind a close", request("GET /v1/models", key, "Connection: close") + INNER, (OK,)),
        Case(
            "behind a close in HTTP/1.0",
            raw("GET /v1/models HTTP/1.0", f"Host: {HOST}", key) + INNER,
            (OK,),
        ),
        Case(
            "one as the body of an offer",
            request("POST /v1/completions", JSON, *offer, body=INNER),
            (NO_KEY,),
        ),
        Case(
            "one as a chunk of an offer",
            chunked("POST /v1/completions", JSON, *offer, body=INNER),
            (NO_KEY,),
        ),
        Case(
            "one as the body of an offer of WebSocket",
            request(
                "POST /v1/completions",
                JSON,
                "Connection: Upgrade",
                "Upgrade: websocket",
                body=INNER,
            ),
            (NO_KEY,),
        ),
        Case("an offer and a request", request("GET /v1/models", key, *offer) + models, (OK, OK)),
        Case(
            "trailer behind an offer",
            bound(*offer, trailers=f"X-Forwarded-For: {BOUND_TO}\r\n".encode()),
            (NOT_FROM_HERE,),
        ),
        Case(
            "one as the body of what waits for 100",
            request("POST /v1/completions", JSON, "Expect: 100-continue", body=INNER),
            (NO_KEY,),
        ),
    ]


CASES = [*_rules(), *_hosts(), *_singletons(), *_framing(), *_chunks(), *_lines(), *_several()]
