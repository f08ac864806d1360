"""The client's address, also behind proxies."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from loraplex.api.http.peer_address import peer_address
from loraplex.api.settings import load_settings
from loraplex.platform.errors import InvalidValue
from loraplex.platform.networks import parse_networks

PROXIES = parse_networks(["10.0.0.0/8", "fd00::/8"])


def request(peer: str | None, *forwarded: str) -> Request:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    client = None if peer is None else (peer, 1234)
    return Request({"type": "http", "headers": headers, "client": client})


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # not a proxy of ours: it may say anything
        ("127.0.0.1", ["198.51.100.7"], "127.0.0.1"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["1.2.3.4, 198.51.100.7"], "198.51.100.7"),  # the first was the caller's word
        ("10.0.0.1", ["1.2.3.4", "198.51.100.7, 10.0.0.2"], "198.51.100.7"),
        ("fd00::1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("::ffff:192.0.2.1", [], "192.0.2.1"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7:5678"], "198.51.100.7"),
        ("10.0.0.1", ["[2001:db8::1]:443"], "2001:db8::1"),
        ("10.0.0.1", ["[2001:db8::1]"], "2001:db8::1"),
        ("10.0.0.1", ["[::ffff:198.51.100.7]:80"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7, 10.0.0.2:80"], "198.51.100.7"),
        ("10.0.0.1", ["fe80::1%anything"], "fe80::1"),
        ("10.0.0.1", ["198.51.100.7:"], None),
        ("10.0.0.1", ["198.51.100.7:123456"], None),
        ("10.0.0.1", ["198.51.100.7:x"], None),
        ("10.0.0.1", ["[198.51.100.7]:80"], None),
        ("10.0.0.1", ["[2001:db8::1"], None),
        ("10.0.0.1", ["[2001:db8::1]x"], None),
        ("10.0.0.1", ["198.51.100.7%anything"], None),
        ("fe80::1%eth0", [], "fe80::1"),
        ("10.0.0.1", ["nonsense"], None),
        ("10.0.0.1", ["198.51.100.7, "], None),
        (None, ["198.51.100.7"], None),
        ("unix", [], None),
    ],
)
def test_a_proxy_is_believed_as_far_as_it_wrote(
    peer: str | None, forwarded: list[str], expected: str | None
) -> None:
    found = peer_address(request(peer, *forwarded), PROXIES)
    assert (None if found is None else str(found)) == expected


def test_proxies_are_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_TRUSTED_PROXIES", "10.0.0.0/8, fd00::/8")
    assert load_settings().trusted_proxies == PROXIES
    monkeypatch.setenv("LORAPLEX_TRUSTED_PROXIES", "")
    assert load_settings().trusted_proxies == ()
    monkeypatch.setenv("LORAPLEX_TRUSTED_PROXIES", "everywhere")
    with pytest.raises(InvalidValue, match="LORAPLEX_TRUSTED_PROXIES"):
        load_settings()
