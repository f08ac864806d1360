"""Addresses of agents, as operators write them."""

from __future__ import annotations

import re

_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)


def parse_address(address: str) -> tuple[str, int]:
    """The host and the port of `host:port`; an IPv6 address is in brackets. Raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 <= int(found["port"]) <= 65535:
        raise ValueError("an address is host:port, with an IPv6 address in brackets")
    return found["v6"] or found["host"], int(found["port"])
