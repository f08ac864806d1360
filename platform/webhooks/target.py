"""Where webhooks may be sent: a strict form of URLs, hosts that the operator lists, and addresses.

A URL that two programs could read differently is refused. The host is a name: an address in any
notation is refused, so the name's certificate always has to be right. Addresses are checked when
the name is resolved, which is with each delivery.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network

from ..errors import WebhookHostNotAllowed, WebhookUrlInvalid
from ..networks import Address, Network

HTTPS_PORT = 443
MAX_URL_LENGTH = 2048
MAX_HOST_LENGTH = 253
MAX_LABEL_LENGTH = 63
_SCHEME = "https://"
_LETTERS = frozenset(string.ascii_lowercase)
_DIGITS = frozenset(string.digits)
_LABEL = _LETTERS | _DIGITS | {"-"}
_HEXADECIMAL = frozenset(string.hexdigits)
_IN_PATHS = frozenset(string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@/?%")
"""The characters of paths and queries in RFC 3986; `#` would begin a fragment."""

PUBLIC_IPV6 = IPv6Network("2000::/3")
"""IPv6 addresses outside it are private, local, multicast, mapped or reserved."""
_REFUSED = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *("224.0.0.0/4", "240.0.0.0/4"),
            "168.63.129.16/32",  # Azure's metadata, in a public range
            # Teredo, ORCHID and others; documentation; 6to4; documentation
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        ),
    )
)
"""Not public by IANA's registries of special-purpose addresses (RFC 6890), or metadata."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that has the strict form."""

    host: str
    """In lower case."""
    port: int
    path: str
    """With the query; begins with `/`."""

    @property
    def url(self) -> str:
        """Always in the same form."""
        return f"{_SCHEME}{_host_and_port(self.host, self.port)}{self.path}"


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """A name, or all names below a name, with one port."""

    name: str
    port: int
    with_names_below: bool
    """The names below are allowed and the name itself is not."""

    def __str__(self) -> str:
        name = f"*.{self.name}" if self.with_names_below else self.name
        return _host_and_port(name, self.port)

    def covers(self, host: str, port: int) -> bool:
        is_named = host.endswith(f".{self.name}") if self.with_names_below else host == self.name
        return is_named and port == self.port


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """What the operator allows. Without hosts no webhook is sent."""

    hosts: tuple[AllowedHost, ...] = ()
    networks: tuple[Network, ...] = ()
    """Networks with addresses that may be used although they are not public."""

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(host.port for host in self.hosts)

    def check(self, url: str) -> Target:
        """The target of a URL. Raises WebhookUrlInvalid or WebhookHostNotAllowed."""
        target = parse_url(url)
        if not self.hosts:
            raise WebhookHostNotAllowed(
                "This server sends no webhooks: the operator has listed no hosts."
            )
        if not any(host.covers(target.host, target.port) for host in self.hosts):
            raise WebhookHostNotAllowed(
                f"The operator has not listed {_host_and_port(target.host, target.port)}."
            )
        return target

    def allows(self, address: Address) -> bool:
        """Whether a connection to this address may be made."""
        if _is_in(address, self.networks):
            return True
        if address.version == 6 and address not in PUBLIC_IPV6:
            return False
        return not _is_in(address, _REFUSED)


def parse_url(url: str) -> Target:
    """The parts of `https://name[:port][/path][?query]`. Raises WebhookUrlInvalid."""
    if len(url) > MAX_URL_LENGTH:
        raise WebhookUrlInvalid(f"The URL has more than {MAX_URL_LENGTH} characters.")
    if not url.startswith(_SCHEME):
        raise WebhookUrlInvalid("The URL does not begin with `https://`.")
    rest = url.removeprefix(_SCHEME)
    end = min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))
    authority, path = rest[:end], rest[end:]
    if "@" in authority:
        raise WebhookUrlInvalid("The URL contains a user name or a password.")
    name, colon, port = authority.partition(":")
    host = _check_name(name)
    _check_path(path)
    return Target(
        host,
        _parse_port(port) if colon else HTTPS_PORT,
        path if path.startswith("/") else f"/{path}",
    )


def parse_allowed_host(text: str) -> AllowedHost:
    """`name`, `name:port`, `*.name` or `*.name:port`. Raises WebhookUrlInvalid."""
    name, colon, port = text.partition(":")
    with_names_below = name.startswith("*.")
    return AllowedHost(
        _check_name(name.removeprefix("*.")),
        _parse_port(port) if colon else HTTPS_PORT,
        with_names_below,
    )


def _check_name(name: str) -> str:
    """The name in lower case. Raises WebhookUrlInvalid unless it is a name of the DNS."""
    if not name.isascii():
        raise WebhookUrlInvalid("The host is not in ASCII; write it in Punycode (`xn--...`).")
    host = name.lower()
    labels = host.split(".")
    if len(host) > MAX_HOST_LENGTH or not all(map(_is_label, labels)):
        raise WebhookUrlInvalid(
            "The host is not a DNS name: labels of a-z, 0-9 and '-', with dots between them."
        )
    if labels[-1][0] in _DIGITS:  # some resolvers read such a name as an address
        raise WebhookUrlInvalid("The host is an IP address, or ends in a number: use a name.")
    return host


def _is_label(label: str) -> bool:
    is_bounded = 0 < len(label) <= MAX_LABEL_LENGTH
    return is_bounded and _LABEL.issuperset(label) and label[0] != "-" and label[-1] != "-"


def _parse_port(text: str) -> int:
    is_plain = 0 < len(text) <= 5 and _DIGITS.issuperset(text) and not text.startswith("0")
    if not is_plain or int(text) > 65535:
        raise WebhookUrlInvalid("The port is not a number from 1 to 65535.")
    return int(text)


def _check_path(path: str) -> None:
    if not _IN_PATHS.issuperset(path):
        raise WebhookUrlInvalid(
            "The path or query contains a character that must be percent-encoded, or a fragment."
        )
    for after in path.split("%")[1:]:
        if len(after) < 2 or not _HEXADECIMAL.issuperset(after[:2]):
            raise WebhookUrlInvalid("A `%` in the URL is not followed by two hexadecimal digits.")


def _host_and_port(host: str, port: int) -> str:
    return host if port == HTTPS_PORT else f"{host}:{port}"


def _is_in(address: Address, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    return any(address in network for network in networks)
