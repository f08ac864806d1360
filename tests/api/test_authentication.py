"""Authentication and its cache: most requests need no query, and none writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import event, select

from loraplex.api.control_plane import auth_cache
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.server.planes import open_control_plane
from loraplex.api.settings import Settings
from loraplex.platform.accounts.service import NO_TIME, AccountService, AuthenticatedSession
from loraplex.platform.audit.event import BY_SYSTEM, Changed, Event
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import ApiKeyRevoked, DatabaseUnavailable
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from loraplex.platform.keys.service import Authenticated
from loraplex.platform.sessions import PlatformSession, TenantSession
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


def test_a_known_key_that_has_ended_is_looked_up(keyed: Keyed) -> None:
    known = asyncio.run(keyed.control_plane.authenticate(keyed.text))
    assert isinstance(known, Principal)
    cache = keyed.control_plane._auth_cache
    cache.put(keyed.text, None, replace(known, expires_at=utc_now()), cache.begin())
    with keyed.statements() as asked:
        keyed.authenticate()
    assert asked


def test_a_key_that_was_refused_is_not_let_in_when_the_database_is_away(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_cache, "TTL_SECONDS", -1.0)
    with keyed.database.transaction(keyed.tenant.id) as session:  # another server's doing
        keyed.control_plane.keys.revoke(session, session.scalars(select(ApiKey)).one().id)
    with pytest.raises(ApiKeyRevoked):
        keyed.authenticate()
    assert keyed.control_plane._auth_cache.get(keyed.text, None, allow_stale=True) is None


def test_a_known_key_serves_in_its_tenant_while_the_database_is_away(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise DatabaseUnavailable

    known = asyncio.run(keyed.control_plane.authenticate(keyed.text, "acme"))
    monkeypatch.setattr(auth_cache, "TTL_SECONDS", -1.0)
    monkeypatch.setattr(keyed.control_plane, "_run", away)
    assert asyncio.run(keyed.control_plane.authenticate(keyed.text, "acme")) is known
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(keyed.control_plane.authenticate(keyed.text, "bolt"))


def test_a_look_up_that_a_change_overtakes_is_not_kept(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, look_up = keyed.control_plane._auth_cache, keyed.control_plane.keys.authenticate

    def overtaken(session: PlatformSession, text: str) -> Authenticated:
        found = look_up(session, text)
        cache.clear()
        return found

    cache.clear()
    monkeypatch.setattr(keyed.control_plane.keys, "authenticate", overtaken)
    keyed.authenticate()
    assert len(cache) == 0


def test_an_idle_pages_request_is_no_use_of_its_session(keyed: Keyed) -> None:
    accounts, idle = SeenAccounts(), timedelta(minutes=7)
    keyed.control_plane.accounts = accounts
    asyncio.run(keyed.control_plane.authenticate_session("lpx_session_x", None, idle))
    wait_for(lambda: len(accounts.seen) == 2)
    assert accounts.seen == [("authenticate", idle), ("note_use", idle)]


class SeenAccounts(AccountService):
    """Knows every session, and what it is told of the person's last use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, timedelta]] = []

    def authenticate(
        self, session: PlatformSession, text: str, idle: timedelta = NO_TIME
    ) -> AuthenticatedSession:
        self.seen.append(("authenticate", idle))
        return AuthenticatedSession(OperatorPrincipal("id", "root", OperatorRole.ADMIN), True)

    def note_use(self, session: PlatformSession, text: str, idle: timedelta = NO_TIME) -> None:
        self.seen.append(("note_use", idle))


def test_a_change_of_any_kind_is_seen_by_the_next_request(keyed: Keyed) -> None:
    def revoke(session: TenantSession) -> Changed[None]:
        key = session.scalars(select(ApiKey)).one()
        keyed.control_plane.keys.revoke(session, key.id)
        return Changed(None, Event("key.revoke", key.id))

    keyed.authenticate()
    asyncio.run(keyed.control_plane.change(keyed.tenant.id, BY_SYSTEM, revoke))
    with pytest.raises(ApiKeyRevoked):
        keyed.authenticate()


def test_the_settings_say_which_secrets_verify_a_key_and_how_long_it_stays_known(
    tmp_path: Path,
) -> None:
    old, new = SecretStr("ab" * 32), SecretStr("cd" * 32)
    settings = Settings(
        data_dir=tmp_path, database=copy_of_migrated_sqlite(tmp_path), secret=old, stale_seconds=0
    )
    before = open_control_plane(settings)
    tenant = make_tenant(before._database, "acme")
    with before._database.transaction(tenant.id) as session:
        text = before.keys.issue(session, name="ci", scopes=[Scope.INFER]).text
    before.close()
    after = open_control_plane(settings.model_copy(update={"secret": new, "secret_previous": old}))
    assert asyncio.run(after.authenticate(text)).actor.name == "ci"
    assert after._auth_cache.get(text, None, allow_stale=True) is None
    with after._database.platform_transaction() as session:
        after.keys.note_use(session, text)
    after.close()
    moved = open_control_plane(settings.model_copy(update={"secret": new}))
    assert asyncio.run(moved.authenticate(text)).actor.name == "ci"
    moved.close()
