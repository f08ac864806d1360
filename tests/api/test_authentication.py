"""The cost of authentication: most requests need no query, and none writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event, select

from loraplex.api.control_plane import auth_cache
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.platform.audit.event import BY_SYSTEM, Changed, Event
from loraplex.platform.database import Database
from loraplex.platform.errors import ApiKeyRevoked
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.keys.principal import Scope
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite
from support.waiting import wait_for


class Keyed:
    """A control plane over a database, a tenant, and its key."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.control_plane = ControlPlane(database, b"secret" * 8)
        self.tenant: Tenant = make_tenant(database, "acme")
        with database.transaction(self.tenant.id) as session:
            self.text = self.control_plane.keys.issue(session, name="ci", scopes=[Scope.INFER]).text

    def authenticate(self) -> None:
        principal = asyncio.run(self.control_plane.authenticate(self.text))
        assert principal.actor.name == "ci"

    def row(self) -> ApiKey:
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            return session.scalars(select(ApiKey)).one()

    @contextmanager
    def statements(self) -> Iterator[list[str]]:
        """What the database is asked meanwhile."""
        asked: list[str] = []

        def note(_c: object, _u: object, text: str, *_rest: object) -> None:
            asked.append(text)

        engine = self.database._writing
        event.listen(engine, "before_cursor_execute", note)
        try:
            yield asked
        finally:
            event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    """A key that was used once, which is written down."""
    keyed = Keyed(Database(copy_of_migrated_sqlite(tmp_path)))
    keyed.authenticate()
    wait_for(lambda: keyed.row().last_used_at is not None)
    yield keyed
    keyed.control_plane.close()


def test_a_key_that_is_known_asks_the_database_nothing(keyed: Keyed) -> None:
    with keyed.statements() as asked:
        for _ in range(10):
            keyed.authenticate()
    assert asked == []


def test_a_key_that_is_looked_up_again_writes_nothing(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_cache, "TTL_SECONDS", -1.0)
    with keyed.statements() as asked:
        for _ in range(3):
            keyed.authenticate()
    # The key, and whether anything limits its tenant.
    assert sum(text.startswith("SELECT") for text in asked) == 3 * 2
    assert not any(text.startswith(("INSERT", "UPDATE", "BEGIN IMMEDIATE")) for text in asked)


def test_a_change_of_any_kind_is_seen_by_the_next_request(keyed: Keyed) -> None:
    def revoke(session: TenantSession) -> Changed[None]:
        key = session.scalars(select(ApiKey)).one()
        keyed.control_plane.keys.revoke(session, key.id)
        return Changed(None, Event("key.revoke", key.id))

    keyed.authenticate()
    asyncio.run(keyed.control_plane.change(keyed.tenant.id, BY_SYSTEM, revoke))
    with pytest.raises(ApiKeyRevoked):
        keyed.authenticate()
