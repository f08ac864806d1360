"""Attestation while other transactions lock the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.api.adapters.attestation import Attestations
from loraplex.api.control_plane import database_watch
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.leases import Leases
from loraplex.engine.errors import NumericalError
from loraplex.engine.process.client import EngineClient
from loraplex.platform import database as database_module
from loraplex.platform.adapters import repository
from loraplex.platform.adapters.models import AdapterVersion
from loraplex.platform.adapters.states import UNFINISHED_STATES, VersionState
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from support.catalog import make_tenant, make_version
from support.databases import copy_of_migrated_sqlite

HELD_SECONDS = 0.2
"""Ten times as long as a writer waits here."""


class BrokenNumbers:
    """An engine under whose adapters nothing is finite; `on_probe` is called at the first probe."""

    def __init__(self, base_id: str, on_probe: Callable[[], None]) -> None:
        self.info = SimpleNamespace(base_id=base_id)
        self.on_probe = on_probe
        self.num_probes = 0

    def submit(self, request: object) -> Any:
        self.num_probes += 1
        if self.num_probes == 1:
            self.on_probe()
        raise NumericalError


class OtherWriter:
    """Another process that writes to the database for a while."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def hold(self) -> None:
        """Until `HELD_SECONDS` have passed on the event loop."""
        held = ExitStack()
        held.enter_context(self._database.platform_transaction()).connection()
        asyncio.get_running_loop().call_later(HELD_SECONDS, held.close)


def test_a_verdict_waits_until_the_database_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 20)
    monkeypatch.setattr(database_watch, "FIRST_RETRY_SECONDS", 0.02)
    url = copy_of_migrated_sqlite(tmp_path)
    database = Database(url)
    acme = make_tenant(database, "acme")
    with database.transaction(acme.id) as session:
        version = make_version(session, state=VersionState.VALIDATED)

    other = OtherWriter(url)
    engine = BrokenNumbers(version.base_id, on_probe=other.hold)

    def find(session: TenantSession) -> AdapterVersion:
        found = repository.find_version(session, version.id)
        assert found is not None
        return found

    async def scenario() -> AdapterVersion:
        control_plane = ControlPlane(database, b"secret" * 8)
        attestations = Attestations(
            engine=cast(EngineClient, engine),
            control_plane=control_plane,
            prompts=[[1]],
            leases=Leases(control_plane, "server"),
        )
        other.hold()
        attestations.start()
        attestations.add(version)
        async with asyncio.timeout(5):
            while (found := await control_plane.read(acme.id, find)).state in UNFINISHED_STATES:
                await asyncio.sleep(0.02)
        await attestations.close()
        control_plane.close()
        return found

    found = asyncio.run(scenario())
    assert found.state is VersionState.REJECTED
    assert found.reason_code == "numerical_error"
    assert engine.num_probes == 1, "it is measured once, however often its verdict is refused"
