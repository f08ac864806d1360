"""Where rank 0 of a group listens. Torch-free."""

from __future__ import annotations

import socket
from typing import NamedTuple

from ..errors import InvalidParameter


class RankAddress(NamedTuple):
    """An address of the host's and a port; 0: any."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


LOOPBACK = RankAddress("127.0.0.1", 0)


def parse_rank_address(text: str, name: str) -> RankAddress:
    """From `host:port`, an IPv6 address in brackets. Raises InvalidParameter for this name."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise InvalidParameter(name, "must be HOST:PORT, with an IPv6 address in brackets")
    if host in ("0.0.0.0", "::"):
        raise InvalidParameter(name, "must be one address of this host, which the others reach")
    return RankAddress(host, int(port))


def resolve(address: RankAddress) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The family and the numeric address. Raises OSError for a name that is not known."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, _, _, _, target = found[0]
    return family, (str(target[0]), int(target[1]))
