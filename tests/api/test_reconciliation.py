"""The desired state in the database is requested from the engine, after any restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.api.adapters.reconciliation import Reconciliation
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.engine.process.client import EngineClient
from loraplex.platform.adapters import service, wishes
from loraplex.platform.adapters.states import WishKind
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable
from support.catalog import BASE_ID, make_digest, make_new_version, make_tenant


@dataclass
class RecordingEngine:
    """What an engine was asked for."""

    base_id: str = BASE_ID
    is_ready: bool = True
    num_restarts: int = 0
    pinned: list[list[AdapterKey]] = field(default_factory=list)
    prefetched: list[tuple[AdapterKey, float]] = field(default_factory=list)

    @property
    def info(self) -> Any:
        return SimpleNamespace(base_id=self.base_id)

    def set_pinned(self, keys: list[AdapterKey], *, as_of: float) -> None:
        assert as_of > 0
        self.pinned.append(list(keys))

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        self.prefetched.append((key, stay_seconds))


@pytest.fixture
def tenant_id(database: Database) -> str:
    return make_tenant(database, "acme").id


def add_ready(database: Database, tenant_id: str, content: str, **changes: str) -> AdapterKey:
    with database.transaction(tenant_id) as session:
        version, _ = service.create_version(session, make_new_version(content, content, **changes))
        service.begin_attestation(session, version.id)
        service.mark_ready(session, version.id, attestation_report={})
    return AdapterKey(tenant_id, make_digest(content))


def wish(
    database: Database, tenant_id: str, name: str, kind: WishKind, ttl: float | None = None
) -> None:
    with database.transaction(tenant_id) as session:
        wishes.set_wish(session, name, 1, kind, ttl_seconds=ttl)


def run(
    database: Database,
    engine: RecordingEngine,
    drive: Callable[[Reconciliation], Awaitable[None]],
) -> None:
    async def main() -> None:
        control_plane = ControlPlane(database, b"secret" * 8)
        await drive(Reconciliation(engine=cast(EngineClient, engine), control_plane=control_plane))

    asyncio.run(main())


def test_pins_of_all_tenants_are_given_to_the_engine_each_time_it_looks(
    database: Database, tenant_id: str
) -> None:
    other = make_tenant(database, "globex").id
    keys = [add_ready(database, tenant, "bot") for tenant in (tenant_id, other)]
    for tenant in (tenant_id, other):
        wish(database, tenant, "bot", WishKind.PIN)
    engine = RecordingEngine()

    async def drive(reconciliation: Reconciliation) -> None:
        await reconciliation.reconcile()
        await reconciliation.reconcile()

    run(database, engine, drive)
    assert [sorted(keys)] * 2 == [sorted(pinned) for pinned in engine.pinned]


def test_an_unpinned_or_deleted_version_is_asked_for_no_more(
    database: Database, tenant_id: str
) -> None:
    for name in ("kept", "unpinned", "deleted"):
        add_ready(database, tenant_id, name)
        wish(database, tenant_id, name, WishKind.PIN)
    engine = RecordingEngine()

    async def drive(reconciliation: Reconciliation) -> None:
        await reconciliation.reconcile()
        with database.transaction(tenant_id) as session:
            wishes.remove_wish(session, "unpinned", 1, WishKind.PIN)
            service.begin_adapter_deletion(session, "deleted")
        await reconciliation.reconcile()

    run(database, engine, drive)
    assert len(engine.pinned[0]) == 3
    assert engine.pinned[1] == [AdapterKey(tenant_id, make_digest("kept"))]


def test_a_prefetch_is_asked_once_in_each_life_of_the_engine(
    database: Database, tenant_id: str
) -> None:
    key = add_ready(database, tenant_id, "bot")
    wish(database, tenant_id, "bot", WishKind.PREFETCH, ttl=3600.0)
    engine = RecordingEngine()

    async def drive(reconciliation: Reconciliation) -> None:
        await reconciliation.reconcile()
        await reconciliation.reconcile()
        assert len(engine.prefetched) == 1
        engine.num_restarts, engine.is_ready = 1, False
        await reconciliation.reconcile()
        assert len(engine.prefetched) == 1, "an engine that is down is asked later"
        engine.is_ready = True
        await reconciliation.reconcile()

    run(database, engine, drive)
    assert [asked for asked, _ in engine.prefetched] == [key, key]
    assert all(3000 < stay <= 3600 for _, stay in engine.prefetched)


def test_expired_wishes_and_versions_of_another_base_are_not_asked_for(
    database: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_ready(database, tenant_id, "brief")
    add_ready(database, tenant_id, "foreign", base_id="another-base")
    wish(database, tenant_id, "brief", WishKind.PIN, ttl=60.0)
    wish(database, tenant_id, "foreign", WishKind.PIN)
    later = utc_now() + timedelta(seconds=61)
    monkeypatch.setattr("loraplex.api.adapters.reconciliation.utc_now", lambda: later)
    engine = RecordingEngine()

    run(database, engine, lambda reconciliation: reconciliation.reconcile())
    assert engine.pinned == [[]]


def test_a_database_that_is_away_delays_and_ends_nothing(
    database: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add_ready(database, tenant_id, "bot")
    wish(database, tenant_id, "bot", WishKind.PIN)
    monkeypatch.setattr("loraplex.api.adapters.reconciliation.INTERVAL_SECONDS", 0.01)
    engine, num_looks = RecordingEngine(), 0
    real = wishes.list_live_wishes_of_all_tenants

    def flaky(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        if num_looks < 3:
            raise DatabaseUnavailable
        return real(*args, **kwargs)

    monkeypatch.setattr(wishes, "list_live_wishes_of_all_tenants", flaky)

    async def drive(reconciliation: Reconciliation) -> None:
        reconciliation.start()
        async with asyncio.timeout(60):
            while not engine.pinned:
                await asyncio.sleep(0.01)
        await reconciliation.close()

    run(database, engine, drive)
    assert engine.pinned[0] == [key]


def test_a_wish_just_made_is_not_waited_for(database: Database, tenant_id: str) -> None:
    engine = RecordingEngine()

    async def drive(reconciliation: Reconciliation) -> None:
        reconciliation.start()
        async with asyncio.timeout(60):
            while not engine.pinned:
                await asyncio.sleep(0.01)
            key = add_ready(database, tenant_id, "bot")
            wish(database, tenant_id, "bot", WishKind.PIN)
            reconciliation.hasten()
            while engine.pinned[-1] != [key]:
                await asyncio.sleep(0.01)
        await reconciliation.close()

    run(database, engine, drive)
