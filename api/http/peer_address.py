"""Determines the client's address, also behind proxies.

`X-Forwarded-For` is trusted only from the configured proxies, and only the part that they wrote:
read from its end, the first address that is not a trusted proxy is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.requests import Request

from ...platform.networks import Address, Network, is_within, parse_address

FORWARDED_FOR = "x-forwarded-for"
_WITH_PORT = re.compile(
    r"(?P<v4>[0-9.]+):[0-9]{1,5}|\[(?P<v6>[0-9A-Fa-f:.]*:[^\]]*)\](?::[0-9]{1,5})?"
)


def peer_address(request: Request, trusted_proxies: Sequence[Network]) -> Address | None:
    """The client's address; None if it is unknown: a Unix socket, or an invalid address."""
    peer = None if request.client is None else parse_address(request.client.host)
    if not is_within(peer, trusted_proxies):
        return peer
    for text in reversed(_forwarded_for(request)):
        peer = _parse_hop(text)
        if not is_within(peer, trusted_proxies):
            return peer
    return peer


def _parse_hop(text: str) -> Address | None:
    """An address as a proxy writes it: some add the port, and IPv6 is then in brackets."""
    found = _WITH_PORT.fullmatch(text)
    return parse_address(text if found is None else found["v4"] or found["v6"])


def _forwarded_for(request: Request) -> list[str]:
    sent = ",".join(request.headers.getlist(FORWARDED_FOR))
    return [part.strip() for part in sent.split(",")] if sent else []
