"""The address on which a server listens."""

from __future__ import annotations

import pytest

from loraplex.api.serve import CannotListen, address, bind, listen


def test_the_slower_of_two_servers_at_one_address_does_not_listen() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            listen(first)
            with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{port}: .* in use.*--port"):
                listen(second)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1:8000: .*--host"):
        bind("192.0.2.1", 8000)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert address("::1", 8000) == "[::1]:8000"
