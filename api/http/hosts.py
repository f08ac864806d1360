"""Checks `Host` against the allowed hosts, if the operator configured them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from starlette.datastructures import Headers


@lru_cache(maxsize=16)
def parse_hosts(text: str | None) -> tuple[str, ...]:
    """Names separated by commas; `*.example.com` is every name below. None and blank: any host."""
    return tuple(name.strip().lower() for name in (text or "").split(",") if name.strip())


def is_allowed(headers: Headers, hosts: Sequence[str]) -> bool:
    """Whether a request with these headers asks for one of the hosts; its port does not matter."""
    if not hosts:
        return True
    name = host_name(headers)
    return any(_matches(name, host) for host in hosts)


def host_name(headers: Headers) -> str:
    """The host that the request asks for, in lower case and without its port."""
    host = headers.get("host", "").lower()
    if host.startswith("["):  # an IPv6 address
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _matches(name: str, host: str) -> bool:
    return name.endswith(host[1:]) if host.startswith("*.") else name == host
