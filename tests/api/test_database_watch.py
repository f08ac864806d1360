"""A database that fails or hangs counts as unavailable, and nothing waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.control_plane import auth_cache, database_watch
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.database_watch import DatabaseWatch
from loraplex.api.control_plane.last_seen import LastSeen
from loraplex.platform.audit.event import BY_SYSTEM, Changed, Event
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable, InvalidApiKey
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.secrets import API_KEY_PEPPER
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite

SECRET = b"secret" * 8


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "PATIENCE_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(database_watch, name, 0.02)


class FakeDatabase:
    """Answers, fails, or hangs until it is let go."""

    def __init__(self) -> None:
        self.is_failing = False
        self.is_free = threading.Event()
        self.is_free.set()

    def ping(self) -> None:
        if self.is_failing:
            raise DatabaseUnavailable
        assert self.is_free.wait(30)


def run(scenario: Callable[[FakeDatabase, DatabaseWatch], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        database = FakeDatabase()
        watch = DatabaseWatch(database.ping)
        watch.start()
        try:
            async with asyncio.timeout(30):
                await scenario(database, watch)
        finally:
            database.is_free.set()
            await watch.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def answer() -> str:
    return "answer"


def test_what_hangs_is_given_up_and_nothing_more_is_tried() -> None:
    async def scenario(database: FakeDatabase, watch: DatabaseWatch) -> None:
        assert await watch.unless_away(answer) == "answer"
        database.is_free.clear()
        with pytest.raises(DatabaseUnavailable):
            await watch.unless_away(lambda: asyncio.sleep(3600))
        with pytest.raises(DatabaseUnavailable):
            await watch.unless_away(answer)
        database.is_free.set()
        await until(lambda: not watch.is_away)
        assert await watch.unless_away(answer) == "answer"

    run(scenario)


def test_work_that_fails_is_no_outage_if_the_database_answers() -> None:
    async def fail() -> None:
        raise DatabaseUnavailable

    async def scenario(database: FakeDatabase, watch: DatabaseWatch) -> None:
        with pytest.raises(DatabaseUnavailable):
            await watch.unless_away(fail)
        await asyncio.sleep(0.1)
        assert not watch.is_away
        database.is_failing = True
        await until(lambda: watch.is_away)

    run(scenario)


def test_a_caller_that_is_cancelled_is_cancelled() -> None:
    async def scenario(database: FakeDatabase, watch: DatabaseWatch) -> None:
        waiting = asyncio.create_task(watch.unless_away(lambda: asyncio.sleep(3600)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(scenario)


def test_a_key_seen_lately_is_good_while_the_database_is_away(tmp_path: Path) -> None:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    tenant = make_tenant(database, "acme")
    service = ApiKeyService(Keyring([SECRET], API_KEY_PEPPER))
    with database.transaction(tenant.id) as session:
        seen, unseen, revoked = (
            service.issue(session, name=name, scopes=[Scope.INFER]) for name in "abc"
        )

    async def main() -> None:
        control_plane = ControlPlane(database, SECRET)
        principal = await control_plane.authenticate(seen.text)
        await control_plane.authenticate(revoked.text)
        with database.transaction(tenant.id) as session:
            service.revoke(session, revoked.key.id)
        control_plane._auth_cache._clock = lambda: 10.0 + time.monotonic()
        with pytest.raises(InvalidApiKey):
            await control_plane.authenticate(revoked.text)
        control_plane.watch.is_away = True
        assert await control_plane.authenticate(seen.text) == principal
        for key in (unseen, revoked):
            with pytest.raises(DatabaseUnavailable):
                await control_plane.authenticate(key.text)
        control_plane._auth_cache._clock = lambda: 400.0 + time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            await control_plane.authenticate(seen.text)
        control_plane.close()

    asyncio.run(main())


def test_no_key_outlives_its_expiry_while_the_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    tenant = make_tenant(database, "acme")
    service = ApiKeyService(Keyring([SECRET], API_KEY_PEPPER))
    end = utc_now() + timedelta(minutes=1)
    with database.transaction(tenant.id) as session:
        issued = service.issue(session, name="a", scopes=[Scope.INFER], expires_at=end)

    async def main() -> None:
        control_plane = ControlPlane(database, SECRET)
        await control_plane.authenticate(issued.text)
        control_plane.watch.is_away = True
        assert await control_plane.authenticate(issued.text)
        monkeypatch.setattr(auth_cache, "utc_now", lambda: end)
        with pytest.raises(DatabaseUnavailable):
            await control_plane.authenticate(issued.text)
        control_plane.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("event", "is_good"),
    [
        (Event("version.create", "bot@1"), True),
        (Event("adapter.delete", "bot"), True),
        (None, True),
        (Event("key.revoke", "another"), False),
        (Event("quota.set", "acme"), False),
        (Event("something.new", "x"), False),
    ],
)
def test_a_change_that_leaves_keys_alone_leaves_them_good_while_the_database_is_away(
    tmp_path: Path, event: Event | None, is_good: bool
) -> None:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    tenant = make_tenant(database, "acme")
    service = ApiKeyService(Keyring([SECRET], API_KEY_PEPPER))
    with database.transaction(tenant.id) as session:
        issued = service.issue(session, name="a", scopes=[Scope.INFER])

    async def main() -> None:
        control_plane = ControlPlane(database, SECRET)
        await control_plane.authenticate(issued.text)
        await control_plane.change(tenant.id, BY_SYSTEM, lambda session: Changed(None, event))
        control_plane.watch.is_away = True
        if is_good:
            assert await control_plane.authenticate(issued.text)
        else:
            with pytest.raises(DatabaseUnavailable):
                await control_plane.authenticate(issued.text)
        control_plane.close()

    asyncio.run(main())


def test_what_was_seen_is_kept_for_its_time_and_bounded() -> None:
    now = 0.0
    seen = LastSeen[str, int](10.0, max_entries=2, clock=lambda: now)
    seen.note("a", 1)
    seen.note("b", 2)
    seen.note("a", 3)
    seen.note("c", 4)
    assert [seen.recall(key) for key in "abc"] == [3, None, 4]
    now = 10.0
    assert seen.recall("a") == 3
    seen.forget("a")
    seen.forget("never there")
    assert seen.recall("a") is None
    now = 10.1
    assert seen.recall("c") is None
