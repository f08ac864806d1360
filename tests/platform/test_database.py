"""The unit of work: atomic, and Loraplex's own error if the database does not answer."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from loraplex.platform import database as database_module
from loraplex.platform.adapters.models import Adapter, AdapterAlias
from loraplex.platform.database import Database, failure_reason, make_engine
from loraplex.platform.errors import (
    DatabaseDamaged,
    DatabaseUnavailable,
    InvalidValue,
    RevisionMismatch,
    TenantExists,
)
from loraplex.platform.sessions import ScopeViolation, TenantSession
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant, make_version


def list_slugs(database: Database) -> list[str]:
    with database.platform_transaction(read_only=True) as session:
        return [tenant.slug for tenant in tenants.list_tenants(session)]


def test_commits_at_the_end(database: Database) -> None:
    make_tenant(database, "acme")
    assert list_slugs(database) == ["acme"]


def test_keeps_nothing_of_a_unit_of_work_that_raises(database: Database) -> None:
    def make_two_tenants_of_one_slug() -> None:
        with database.platform_transaction() as session:
            tenants.create_tenant(session, "acme")
            tenants.create_tenant(session, "bolt")
            tenants.create_tenant(session, "acme")

    with pytest.raises(TenantExists):
        make_two_tenants_of_one_slug()
    assert list_slugs(database) == []


def test_says_so_of_what_it_cannot_hold(postgres_database: Database) -> None:
    """Such as NUL, which SQLite holds and PostgreSQL does not, not even to look for it."""
    with (
        pytest.raises(InvalidValue, match="NUL"),
        postgres_database.platform_transaction(read_only=True) as session,
    ):
        tenants.get_tenant(session, "a\0b")


def test_rows_stay_readable_after_the_commit(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
    assert version.number == 1


def test_refuses_writes_of_a_reader(database: Database) -> None:
    with pytest.raises(ScopeViolation), database.platform_transaction(read_only=True) as session:
        tenants.create_tenant(session, "acme")
    assert list_slugs(database) == []


def test_refuses_changed_rows_of_a_reader(database: Database, acme: Tenant) -> None:
    with pytest.raises(ScopeViolation), database.platform_transaction(read_only=True) as session:
        tenants.set_suspended(tenants.get_tenant(session, acme.slug), True)


def test_readers_read_while_a_writer_writes(database: Database, acme: Tenant) -> None:
    with database.platform_transaction() as session:
        tenants.create_tenant(session, "bolt")
        session.flush()
        assert list_slugs(database) == ["acme"]
    assert list_slugs(database) == ["acme", "bolt"]


def test_refuses_rows_of_a_tenant_that_is_not_there(database: Database) -> None:
    with pytest.raises(IntegrityError), database.transaction("nobody") as session:
        session.add(Adapter(name="support-bot"))


def test_refuses_references_into_another_tenant(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
    with pytest.raises(IntegrityError), database.transaction(bolt.id) as session:
        session.add(AdapterAlias(adapter_id=version.adapter_id, version_id=version.id, name="prod"))


def test_sqlite_syncs_every_commit_of_its_journal(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.platform_transaction(read_only=True) as session:
        settings = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    database.close()
    assert settings == {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "foreign_keys": 1,
        "busy_timeout": 5000,
    }


def test_reports_a_database_that_stays_locked(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 20)
    holder, waiter = Database(sqlite_url), Database(sqlite_url)
    with holder.platform_transaction() as session:
        tenants.create_tenant(session, "acme")
        session.flush()
        with pytest.raises(DatabaseUnavailable), waiter.platform_transaction() as other:
            tenants.list_tenants(other)
    holder.close()
    waiter.close()


@pytest.mark.parametrize(
    "url",
    ["sqlite:////no/such/folder/x.db", "postgresql+psycopg://nobody@/nowhere?host=/no/such/folder"],
)
def test_reports_a_database_that_is_not_there(url: str) -> None:
    if url.startswith("postgresql"):
        pytest.importorskip("psycopg")
    database = Database(url)
    with pytest.raises(DatabaseUnavailable), database.platform_transaction() as session:
        tenants.list_tenants(session)
    with pytest.raises(DatabaseUnavailable):
        database.check_revision()
    database.close()


@pytest.mark.parametrize("is_empty_schema", [True, False], ids=["no database", "half of one"])
def test_says_so_of_a_damaged_file(is_empty_schema: bool, tmp_path: Path) -> None:
    path = tmp_path / "loraplex.db"
    database = Database(f"sqlite:///{path}")
    if is_empty_schema:
        path.write_bytes(b"not a database" * 1000)
    else:
        database.upgrade()
        database.close()
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    for use in (database.upgrade, database.check_revision, database.ping):
        with pytest.raises(DatabaseDamaged) as caught:
            use()
        assert "restore it from a backup" in failure_reason(caught.value)
    database.close()


def test_leaves_a_newer_schema_alone(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    database.upgrade()
    with database.platform_transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for use in (database.upgrade, database.check_revision):
        with pytest.raises(RevisionMismatch, match="another version of this software"):
            use()
    assert database.current_revision() == "9999"
    database.close()


WRITER = """
import itertools, sys
from loraplex.platform.database import Database, failure_reason, make_engine
from loraplex.platform.tenants import service as tenants

database = Database(sys.argv[1])
for number in itertools.count():
    with database.platform_transaction() as session:
        tenants.create_tenant(session, f"tenant-{number}")
    print(f"tenant-{number}", flush=True)
"""


@pytest.mark.parametrize("num_acknowledged", [1, 7, 40])
def test_keeps_what_a_killed_writer_acknowledged(
    sqlite_url: str, tmp_path: Path, num_acknowledged: int
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, sqlite_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(num_acknowledged)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += writer.stdout.read().split()
    connection = sqlite3.connect(tmp_path / "loraplex.db")
    (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
    slugs = {slug for (slug,) in connection.execute("SELECT slug FROM tenants")}
    connection.close()
    assert integrity == "ok"
    assert len(acknowledged) >= num_acknowledged
    assert set(acknowledged) <= slugs


def test_a_reader_sees_one_moment(database: Database, acme: Tenant) -> None:
    def names(session: TenantSession) -> list[str]:
        return list(session.scalars(select(Adapter.name)))

    with database.transaction(acme.id, read_only=True) as reader:
        assert names(reader) == []
        with database.transaction(acme.id) as writer:
            writer.add(Adapter(name="bot"))
        assert names(reader) == [], "not what was committed meanwhile"
    with database.transaction(acme.id, read_only=True) as reader:
        assert names(reader) == ["bot"]


def test_a_new_file_waits_for_who_writes_to_it(tmp_path: Path) -> None:
    """Another process that makes it its own at this moment: SQLite itself does not wait then."""
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    engine = make_engine(f"sqlite:///{path}")
    release = Timer(0.1, lambda: other.execute("COMMIT"))
    release.start()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    release.join()
    engine.dispose()
    other.close()
