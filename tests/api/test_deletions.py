"""A server reports to the others when it has released deleted content."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.api.adapters.deletions import Deletions
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.leases import Leases
from loraplex.engine.messages import EvictionReceipt
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.service import Deletion
from loraplex.platform.database import Database
from loraplex.platform.jobs import service as jobs
from loraplex.platform.servers import service as servers
from loraplex.platform.servers.models import Server
from loraplex.platform.servers.service import ServerInfo
from support.catalog import make_tenant, make_version

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
HERE = ServerInfo(id="here", name="host", version="1", base_id="base", started_at=STARTED)


class BusyEngine:
    """Lets go of one adapter when it is told to, of all others at once."""

    def __init__(self, busy: AdapterKey) -> None:
        self.is_asked = asyncio.Event()
        self.may_let_go = asyncio.Event()
        self._busy = busy

    async def evict_adapter(self, key: AdapterKey, *, drain_seconds: float) -> None:
        if key == self._busy:
            self.is_asked.set()
            await self.may_let_go.wait()


@pytest.fixture
def begun(database: Database) -> list[Deletion]:
    """Two deletions that another server finishes; `here` is alive."""
    tenant = make_tenant(database, "acme")
    with database.transaction(tenant.id) as session:
        for name in ("used", "idle"):
            make_version(session, name, content=name)
        begun = [catalog.begin_version_deletion(session, name, 1) for name in ("used", "idle")]
    with database.platform_transaction() as session:
        servers.note_seen(session, HERE)
        for deletion in begun:
            assert jobs.claim(session, f"deletion:{deletion.version_id}", "there")
    return begun


def make_deletions(control_plane: ControlPlane, engine: BusyEngine) -> Deletions:
    return Deletions(
        engine=cast(Any, engine),
        fetcher=cast(Any, SimpleNamespace(forget=lambda key: None)),
        store=cast(Any, None),
        control_plane=control_plane,
        leases=Leases(control_plane, "here"),
    )


def released_at(database: Database) -> datetime | None:
    with database.platform_transaction(read_only=True) as session:
        return session.get_one(Server, "here").evicted_at


def test_a_server_has_released_what_is_deleted_once_it_uses_none_of_it(
    database: Database, begun: list[Deletion]
) -> None:
    async def run() -> None:
        engine = BusyEngine(begun[0].key)
        control_plane = ControlPlane(database, b"secret")
        deletions = make_deletions(control_plane, engine)
        deletions._begin(begun[0], 30.0)  # its requests still run
        await engine.is_asked.wait()
        await deletions.look()
        assert released_at(database) is None
        engine.may_let_go.set()
        while released_at(database) is None:
            await asyncio.sleep(0.01)
            await deletions.look()
        await deletions.close()
        control_plane.close()

    asyncio.run(run())


def test_a_server_that_finishes_one_deletion_keeps_no_other_server_waiting_with_another(
    database: Database, begun: list[Deletion]
) -> None:
    """It waits for that server itself: each would wait for the other."""
    with database.platform_transaction() as session:
        jobs.forget(session, f"deletion:{begun[0].version_id}", "there")

    async def run() -> None:
        engine = BusyEngine(begun[0].key)
        control_plane = ControlPlane(database, b"secret")
        deletions = make_deletions(control_plane, engine)
        deletions._begin(begun[0], 30.0)
        await engine.is_asked.wait()
        await deletions.look()
        assert released_at(database) is not None
        await deletions.close()
        control_plane.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_server_gives_up_what_another_one_deletes_unless_a_version_still_has_it(
    database: Database, *, is_shared: bool
) -> None:
    tenant = make_tenant(database, "acme")
    with database.transaction(tenant.id) as session:
        make_version(session, "gone", content="same")
        make_version(session, "stays", content="same" if is_shared else "other")
        begun = catalog.begin_version_deletion(session, "gone", 1)
    with database.platform_transaction() as platform:
        servers.note_seen(platform, HERE)
        assert jobs.claim(platform, f"deletion:{begun.version_id}", "there")
    given_up: list[tuple[str, object]] = []

    class Engine:
        async def evict_adapter(self, key: AdapterKey, *, drain_seconds: float) -> None:
            given_up.append(("engine", key))

        def forget_outputs(self, key: AdapterKey) -> None:
            given_up.append(("outputs", key))

    class Fetcher:
        def forget(self, key: AdapterKey) -> None:
            given_up.append(("disk", key))

    async def run() -> None:
        control_plane = ControlPlane(database, b"secret")
        control_plane.note_change = lambda tenant_id: given_up.append(("names", tenant_id))
        deletions = Deletions(
            engine=cast(Any, Engine()),
            fetcher=cast(Any, Fetcher()),
            store=cast(Any, None),
            control_plane=control_plane,
            leases=Leases(control_plane, "here"),
        )
        await deletions.look()
        await deletions.look()  # once is enough
        await deletions.close()
        control_plane.close()

    asyncio.run(run())
    content = [("engine", begun.key), ("disk", begun.key)]
    if is_shared:  # the other version does not draft from what the deleted one has answered
        content = [("outputs", begun.key)]
    assert given_up == [("names", tenant.id), *content]
    assert released_at(database) is not None


def test_a_deletion_that_another_server_finished_meanwhile_leaves_content_pushed_since(
    database: Database,
) -> None:
    """This server was paused for so long that it lost the lease."""
    tenant = make_tenant(database, "acme")
    with database.transaction(tenant.id) as session:
        make_version(session, "bot", content="same")
        begun = catalog.begin_version_deletion(session, "bot", 1)
    removed: list[str] = []

    def pause(key: AdapterKey) -> None:
        with database.transaction(tenant.id) as session:
            catalog.finish_deletion(session, begun.version_id)
            make_version(session, "bot", content="same")

    async def run() -> None:
        control_plane = ControlPlane(database, b"secret")
        deletions = Deletions(
            engine=cast(Any, SimpleNamespace(evict_adapter=evict_nothing)),
            fetcher=cast(Any, SimpleNamespace(forget=pause)),
            store=cast(Any, SimpleNamespace(exists=lambda key: True, delete=removed.append)),
            control_plane=control_plane,
            leases=Leases(control_plane, "here"),
        )
        assert await deletions._begin(begun, 0.0) == begun
        await deletions.close()
        control_plane.close()

    asyncio.run(run())
    assert removed == []


async def evict_nothing(key: AdapterKey, *, drain_seconds: float) -> EvictionReceipt:
    return EvictionReceipt()
