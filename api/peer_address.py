"""From which address a request comes, also behind proxies.

`X-Forwarded-For` is believed only from the proxies that the operator names, and only as far as
those wrote it: read from its end, the first address that is none of theirs is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from ..platform.networks import Address, Network, is_within, parse_address

FORWARDED_FOR = "x-forwarded-for"


def peer_address(request: Request, trusted_proxies: Sequence[Network]) -> Address | None:
    """The caller's address; None if it is not known: a Unix socket's, or what no address is."""
    peer = None if request.client is None else parse_address(request.client.host)
    if not is_within(peer, trusted_proxies):
        return peer
    for text in reversed(_forwarded_for(request)):
        peer = parse_address(text)
        if not is_within(peer, trusted_proxies):
            return peer
    return peer


def _forwarded_for(request: Request) -> list[str]:
    sent = ",".join(request.headers.getlist(FORWARDED_FOR))
    return [part.strip() for part in sent.split(",")] if sent else []
