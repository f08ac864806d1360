"""Ambiguous heads are refused, and the error names the part."""

from __future__ import annotations

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.http.head import MAX_HEAD_BYTES, SINGLETONS, Head, check_head

HOST = (b"host", b"api.example")


def head(
    *headers: tuple[bytes, bytes],
    target: bytes = b"/v1/models",
    method: bytes = b"GET",
    version: str = "1.1",
) -> Head:
    return Head(method, version, target, list(headers))


@pytest.mark.parametrize(
    "host",
    [b"a", b"api.example:8000", b"a_b", b"10.0.0.1:", b"[::1]", b"[2001:DB8::1]:443", b"xn--p1ai"],
)
def test_hosts_are_names_or_addresses_with_or_without_a_port(host: bytes) -> None:
    check_head(head((b"host", host)))


NO_HOSTS = (
    rb"""a b|a,b|user@a|a/|a?|a#|a:x|a:123456|::1|[::1|[a]|[::1]x|a\b|a%41|http://a|a:1:2|"a\"|*"""
)


@pytest.mark.parametrize("host", [b"", b" ", b"a\tb", b"\xc3\xa9", *NO_HOSTS.split(b"|")])
def test_other_hosts_are_refused(host: bytes) -> None:
    with pytest.raises(ApiError, match="`Host` must be"):
        check_head(head((b"host", host)))


def test_only_old_http_needs_no_host() -> None:
    check_head(head(version="1.0"))
    with pytest.raises(ApiError, match="needs a `Host`"):
        check_head(head())
    for version in ("0.9", "2.0"):
        with pytest.raises(ApiError, match="version"):
            check_head(head(HOST, version=version))


@pytest.mark.parametrize("name", sorted(SINGLETONS))
def test_what_decides_is_sent_once(name: bytes) -> None:
    value = {b"host": b"a", b"transfer-encoding": b"chunked"}.get(name, b"1")
    others = () if name == b"host" else (HOST,)
    check_head(head(*others, (name, value)))
    with pytest.raises(ApiError, match=f"`{name.decode()}` may be sent only once"):
        check_head(head(*others, (name, value), (b"accept", b"*/*"), (name, value)))


@pytest.mark.parametrize("value", [b"gzip, chunked", b"identity", b"", b"chunked;x", b"chunked,"])
def test_bodies_are_chunked_or_have_a_length(value: bytes) -> None:
    check_head(head(HOST, (b"transfer-encoding", b"Chunked")))
    with pytest.raises(ApiError, match="`Transfer-Encoding`"):
        check_head(head(HOST, (b"transfer-encoding", value)))
    with pytest.raises(ApiError, match="`Transfer-Encoding`"):
        check_head(head(HOST, (b"transfer-encoding", b"chunked"), version="1.0"))


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://api.example/v1/models", b"api.example"),
        (b"HTTP://API.example:80/v1/models?x", b"api.EXAMPLE"),
        (b"http://api.example/", b"api.example:80"),
        (b"https://api.example/", b"api.example:443"),
        (b"http://[::1]:8000/", b"[::1]:8000"),
        (b"//x/v1/models", b"api.example"),
    ],
)
def test_a_target_may_repeat_the_host(target: bytes, host: bytes) -> None:
    check_head(head((b"host", host), target=target))


@pytest.mark.parametrize(
    "target",
    [
        b"http://other.example/v1/models",
        b"http://api.example:8000/v1/models",
        b"https://api.example/v1/models",
        b"http://user@api.example/v1/models",
        b"http://api.example@other.example/",
        b"http:///v1/models",
        b"http://api.example.:80/",
        b"ftp://api.example/",
        b"http:/v1/models",
        b"api.example:80",
        b"*",
        b"",
        b"/v1/models#x",
    ],
)
def test_a_target_that_names_another_host_or_none_is_refused(target: bytes) -> None:
    with pytest.raises(ApiError, match="target"):
        check_head(head((b"host", b"api.example:80"), target=target))


def test_only_options_asks_for_everything_and_nobody_connects() -> None:
    check_head(head(HOST, target=b"*", method=b"OPTIONS"))
    with pytest.raises(ApiError, match="CONNECT"):
        check_head(head(HOST, target=b"a:80", method=b"CONNECT"))


def test_the_bound_counts_the_target_names_and_values() -> None:
    rest = MAX_HEAD_BYTES - len(b"/v1/models" + HOST[0] + HOST[1])
    check_head(head(HOST, (b"x", b"a" * (rest - 1))))
    with pytest.raises(ApiError) as refused:
        check_head(head(HOST, (b"x", b"a" * rest)))
    assert refused.value.code == "headers_too_large"


def test_a_head_is_written_as_it_was_read_less_one_header() -> None:
    read = head(HOST, (b"upgrade", b"h2c"), (b"x", b"1"), (b"x", b"2"), (b"upgrade", b"y"))
    written = b"GET /v1/models HTTP/1.1\r\nhost: api.example\r\nx: 1\r\nx: 2\r\n\r\n"
    assert read.without(b"upgrade") == written
