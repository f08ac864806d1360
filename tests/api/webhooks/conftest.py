"""A receiver on the loopback interface, and the policy that lets webhooks reach it."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from loraplex.platform.database import Database
from loraplex.platform.webhooks.target import TargetPolicy, parse_allowed_host
from support.databases import copy_of_migrated_sqlite
from support.webhooks import Receiver, receiving


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the receiver's certificates."""
    return tmp_path_factory.mktemp("receiver")


@pytest.fixture(scope="module")
def receiver(authority: Path) -> Iterator[Receiver]:
    with receiving(authority) as found:
        yield found


@pytest.fixture(scope="module")
def policy(receiver: Receiver) -> TargetPolicy:
    """The receiver, although it is on this machine."""
    host = parse_allowed_host(f"localhost:{receiver.port}")
    return TargetPolicy((host,), (ip_network("127.0.0.0/8"),))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A migrated, empty database without a server."""
    database = Database(copy_of_migrated_sqlite(tmp_path))
    yield database
    database.close()
