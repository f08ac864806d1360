"""Checks the head of an HTTP/1.1 request before the application sees it.

The parser interprets the bytes; this module decides whether a proxy could have interpreted the same
bytes differently. An ambiguous head is refused, never repaired.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..contract.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
SINGLETONS = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"cookie",
        b"host",
        b"idempotency-key",
        b"origin",
        b"sec-fetch-site",
        b"transfer-encoding",
        b"x-api-key",
        b"x-csrf-token",
        b"x-loraplex-idle-seconds",
        b"x-loraplex-tenant",
    }
)
"""Headers that decide about a request and mean one value: sent twice, each reader takes another."""
_VERSIONS = frozenset({"1.0", "1.1"})
_HOST = re.compile(
    rb"(?P<name>[a-z0-9._~-]+|\[[0-9a-f.]*:[0-9a-f:.]*\])(?::(?P<port>[0-9]{0,5}))?",
    re.IGNORECASE,
)
_ABSOLUTE_TARGET = re.compile(rb"(?P<scheme>https?)://(?P<authority>[^/?]*)", re.IGNORECASE)
_DEFAULT_PORTS = {b"http": b"80", b"https": b"443"}


class Head(NamedTuple):
    """A request line and its headers, whose names are in lower case."""

    method: bytes
    version: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]

    @property
    def num_bytes(self) -> int:
        return len(self.target) + sum(map(len, map(b"".join, self.headers)))

    def without(self, name: bytes) -> bytes:
        """The head as bytes, less the headers of this name."""
        lines = [b"%b %b HTTP/%b" % (self.method, self.target, self.version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != name]
        return b"\r\n".join([*lines, b"", b""])


def check_head(head: Head) -> None:
    """Raise ApiError unless every parser interprets this head in the same way."""
    if head.num_bytes > MAX_HEAD_BYTES:
        raise ApiError("headers_too_large")
    if head.version not in _VERSIONS:
        raise _malformed("The HTTP version must be 1.1 or 1.0.")
    if head.method == b"CONNECT":
        raise _malformed("This server is not a proxy: CONNECT is not supported.")
    found = _by_name(head.headers)
    host = found.get(b"host")
    if host is None and head.version == "1.1":
        raise _malformed("An HTTP/1.1 request needs a `Host` header.")
    if host is not None and not _HOST.fullmatch(host):
        raise _malformed("`Host` must be a name or an address, with or without a port.")
    _check_coding(found.get(b"transfer-encoding"), head.version)
    _check_target(head, host)


def _by_name(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by name, after checking that the singletons occur at most once."""
    by_name = dict(headers)
    if len(by_name) < len(headers):
        counts = Counter(name for name, _ in headers)
        if twice := {name for name in SINGLETONS if counts[name] > 1}:
            raise _malformed(f"The header `{min(twice).decode()}` may be sent only once.")
    return by_name


def _check_coding(coding: bytes | None, version: str) -> None:
    if coding is not None and (coding.lower() != b"chunked" or version != "1.1"):
        raise _malformed("`Transfer-Encoding` may only be `chunked`, and only in HTTP/1.1.")


def _check_target(head: Head, host: bytes | None) -> None:
    if b"#" in head.target:
        raise _malformed("The request target cannot have a fragment: send `#` as `%23`.")
    if head.target.startswith(b"/") or (head.target == b"*" and head.method == b"OPTIONS"):
        return
    absolute = _ABSOLUTE_TARGET.match(head.target)
    if absolute is None:
        raise _malformed("The request target must be a path or an `http` URL.")
    target_host = _normal_host(absolute["authority"], absolute["scheme"])
    if target_host is None or (
        host is not None and target_host != _normal_host(host, absolute["scheme"])
    ):
        raise _malformed("The host of the request target must be the one in `Host`.")


def _normal_host(authority: bytes, scheme: bytes) -> tuple[bytes, bytes] | None:
    """Name and port; None for an invalid host, such as one with user information."""
    found = _HOST.fullmatch(authority)
    if found is None:
        return None
    return found["name"].lower(), found["port"] or _DEFAULT_PORTS[scheme.lower()]


def _malformed(message: str) -> ApiError:
    return ApiError("malformed_request", message)
