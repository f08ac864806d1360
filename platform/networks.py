"""Networks in CIDR notation, to which a key may be restricted."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from .errors import InvalidValue

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address


def parse_networks(texts: Iterable[str], *, param: str = "networks") -> tuple[Network, ...]:
    """The networks, each once and in order. Raises InvalidValue for an invalid one."""
    try:
        return tuple(dict.fromkeys(map(ip_network, texts)))
    except ValueError as exc:
        raise InvalidValue(
            f"{exc}. Write a network as 10.1.0.0/16 or 2001:db8::/32, a single address as it is.",
            param=param,
        ) from None


def parse_address(text: str) -> Address | None:
    """The address without its zone, unwrapping IPv4-mapped IPv6; None if it is invalid."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))  # a zone is any text


def is_within(address: Address | None, networks: Iterable[Network]) -> bool:
    """The address is known and in one of the networks."""
    return address is not None and any(address in network for network in networks)


def is_covered(inner: Network, outer: Iterable[Network]) -> bool:
    """Every address of `inner` is in one and the same of the outer networks."""
    return any(
        inner.subnet_of(network)  # type: ignore[arg-type]  # of one version, as is asked first
        for network in outer
        if network.version == inner.version
    )
