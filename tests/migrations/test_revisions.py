"""Migrations on both databases: upgrade, downgrade, with data, concurrently, and the resulting
schema.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, select, text

from loraplex.platform import revisions
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import wishes
from loraplex.platform.adapters.canary import Canary
from loraplex.platform.adapters.canary_limits import CanaryLimits
from loraplex.platform.adapters.states import UploadState, VersionState, WishKind
from loraplex.platform.database import Database, make_engine
from loraplex.platform.errors import RevisionMismatch
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.models import Base
from loraplex.platform.usage import service as usage
from support.catalog import make_tenant, make_version
from support.databases import (
    copy_of_migrated_postgres,
    copy_of_migrated_sqlite,
    new_postgres_url,
    new_sqlite_url,
)
from support.filled_tables import fill_tables
from support.scale import part_of
from support.uploads import bring_upload_to, make_upload


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    opened = new_sqlite_url(tmp_path) if kind == "sqlite" else new_postgres_url()
    with opened as url:
        yield url


@pytest.fixture
def migrated_url(kind: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with the newest schema and no rows."""
    if kind == "sqlite":
        yield copy_of_migrated_sqlite(tmp_path)
        return
    with copy_of_migrated_postgres() as url:
        yield url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = make_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url)
    yield database
    database.close()


@pytest.fixture
def migrated(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.close()


@pytest.fixture
def migrated_engine(migrated_url: str) -> Iterator[Engine]:
    engine = make_engine(migrated_url)
    yield engine
    engine.dispose()


def all_revisions() -> list[str]:
    script = ScriptDirectory(str(revisions.MIGRATIONS))
    return [revision.revision for revision in reversed(list(script.walk_revisions()))]


def fill(database: Database) -> None:
    """At least one row in every table."""
    tenant_id = make_tenant(database, "acme").id
    with database.transaction(tenant_id) as session:
        ApiKeyService(Keyring([b"secret" * 8], "pepper")).issue(
            session, name="ci", scopes=[Scope.INFER]
        )
        for state in VersionState:
            make_version(session, content=state, state=state)
        for content in ("one", "two"):
            make_version(session, "other", content)
        catalog.set_alias(session, "other", "prod", 1, canary=Canary(2, 12.5))
        wishes.set_wish(session, "other", 1, WishKind.PIN, ttl_seconds=60)
        bring_upload_to(session, make_upload(session), UploadState.ACCEPTED)
        used = usage.Usage(
            request_id="request-1",
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=1,
            finish_reason="stop",
        )
        usage.record(session, used)
    with database.platform_transaction() as session:
        fill_tables(session.connection(), 1)


def count_rows(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {
            name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
            for name in Base.metadata.tables
        }


def test_the_tables_are_those_of_the_models(migrated_engine: Engine) -> None:
    with migrated_engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_the_checks_are_those_of_the_models(migrated_engine: Engine) -> None:
    # Alembic does not compare check constraints, nor the conditions of partial indexes.
    migrated = read_conditions(migrated_engine)
    with migrated_engine.begin() as connection:
        Base.metadata.drop_all(connection)
        Base.metadata.create_all(connection)
    assert migrated == read_conditions(migrated_engine)
    assert migrated["adapter_versions"]["ck_adapter_versions_state"]
    assert migrated["adapter_versions"]["uq_adapter_versions_live_digest"]


def read_conditions(engine: Engine) -> dict[str, dict[str, str]]:
    """The conditions of each table's checks and partial indexes, as the database words them."""
    inspector = inspect(engine)
    where = f"{engine.dialect.name}_where"
    conditions: dict[str, dict[str, str]] = {}
    for table in Base.metadata.tables:
        checks = {
            str(check["name"]): check["sqltext"] for check in inspector.get_check_constraints(table)
        }
        indexes = {
            str(index["name"]): str(index["dialect_options"][where])
            for index in inspector.get_indexes(table)
            if where in index.get("dialect_options", {})
        }
        conditions[table] = checks | indexes
    return conditions


def test_goes_forward_and_back_through_every_revision(
    url: str, database: Database, engine: Engine
) -> None:
    assert database.current_revision() is None
    for revision in all_revisions():
        revisions.upgrade(url, revision)
        assert database.current_revision() == revision
        revisions.downgrade(url, "-1")
        revisions.upgrade(url, revision)
    database.check_revision()
    revisions.downgrade(url, "base")
    assert database.current_revision() is None
    assert inspect(engine).get_table_names() == ["alembic_version"]


def test_goes_back_and_forward_with_data(
    migrated_url: str, migrated: Database, migrated_engine: Engine
) -> None:
    fill(migrated)
    assert min(count_rows(migrated_engine).values()) >= 1
    revisions.downgrade(migrated_url, "base")
    migrated.upgrade()
    fill(migrated)


def test_going_back_keeps_the_limits_of_canaries_that_the_revision_knows(
    migrated_url: str, migrated: Database, migrated_engine: Engine
) -> None:
    limits = CanaryLimits(latency=None, judge_model="judge")
    with migrated.transaction(make_tenant(migrated, "acme").id) as session:
        for content in ("one", "two"):
            make_version(session, "bot", content)
        catalog.set_alias(session, "bot", "prod", 1, canary=Canary(2, 12.5, limits))
        catalog.set_alias(session, "bot", "blue", 1)
    revisions.downgrade(migrated_url, "0126")
    known = {"error_rate", "refusals", "length", "latency", "min_requests"}
    expected = {name: value for name, value in limits.as_json().items() if name in known}
    with migrated_engine.connect() as connection:
        for table in ("adapter_aliases", "adapter_alias_changes"):
            rows = connection.execute(text(f"SELECT canary_limits FROM {table}")).scalars().all()
            parsed = [json.loads(row) if isinstance(row, str) else row for row in rows]
            assert sorted(parsed, key=str) == [None, expected]


NUM_ROWS = part_of(200, 10_000)


def test_full_tables_go_and_come_back_as_they_were(
    migrated_url: str, migrated: Database, migrated_engine: Engine
) -> None:
    fill_all_tables(migrated)
    assert set(count_rows(migrated_engine).values()) == {NUM_ROWS}
    before = read_digests(migrated_engine)
    revisions.downgrade(migrated_url, "base")
    assert inspect(migrated_engine).get_table_names() == ["alembic_version"]
    migrated.upgrade()
    assert set(count_rows(migrated_engine).values()) == {0}
    fill_all_tables(migrated)
    assert read_digests(migrated_engine) == before
    migrated.check_revision()


def fill_all_tables(database: Database) -> None:
    with database.platform_transaction() as session:
        fill_tables(session.connection(), NUM_ROWS)


def read_digests(engine: Engine) -> dict[str, str]:
    """Of what each table holds, in the order of the primary key."""
    digests = {}
    with engine.connect() as connection:
        for name, table in Base.metadata.tables.items():
            rows = connection.execute(select(table).order_by(*table.primary_key.columns)).all()
            digests[name] = hashlib.sha256(repr(rows).encode()).hexdigest()
    return digests


def test_upgrading_again_changes_nothing(migrated: Database, migrated_engine: Engine) -> None:
    fill(migrated)
    before = count_rows(migrated_engine)
    migrated.upgrade()
    assert count_rows(migrated_engine) == before


def test_threads_upgrade_one_after_another(tmp_path: Path) -> None:
    barrier = Barrier(4)

    def upgrade(number: int) -> str | None:
        database = Database(f"sqlite:///{tmp_path / str(number % 2)}.db")
        barrier.wait()
        database.upgrade()
        database.close()
        return database.current_revision()

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(upgrade, range(4))) == {revisions.head_revision()}


MIGRATORS = """
import sys
from multiprocessing import get_context
from loraplex.platform import revisions

def migrate():
    together.wait()
    revisions.upgrade(sys.argv[1])

context = get_context("fork")  # what they import, 1 s of CPU, is imported once
together = context.Barrier(3)
migrators = [context.Process(target=migrate) for _ in range(3)]
for migrator in migrators:
    migrator.start()
for migrator in migrators:
    migrator.join()
print([migrator.exitcode for migrator in migrators])
"""


def test_of_several_migrators_one_does_the_work(url: str, database: Database) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MIGRATORS, url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=True,
    )
    assert ended.stdout == "[0, 0, 0]\n"
    database.check_revision()
    fill(database)


def test_keeps_nothing_of_a_migration_that_fails(
    url: str, engine: Engine, database: Database
) -> None:
    # The last table of the first revision is in the way.
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE idempotent_answers (id INTEGER)"))
    with pytest.raises(Exception, match="idempotent_answers"):
        revisions.upgrade(url)
    assert database.current_revision() is None
    assert "tenants" not in inspect(engine).get_table_names()


def test_refuses_to_work_without_a_schema(database: Database) -> None:
    with pytest.raises(RevisionMismatch, match="loraplex db upgrade") as caught:
        database.check_revision()
    assert (caught.value.current, caught.value.head) == (None, revisions.head_revision())


def test_refuses_to_work_with_an_older_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revisions, "head_revision", lambda: "9999")
    with pytest.raises(RevisionMismatch, match="is at 0001, not 9999: run"):
        revisions.check_revision("0001")


def test_refuses_to_work_with_the_schema_of_other_software(
    migrated: Database, migrated_engine: Engine
) -> None:
    with migrated_engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'future'"))
    with pytest.raises(RevisionMismatch, match="another version of this software"):
        migrated.check_revision()


def test_revisions_are_one_line() -> None:
    script = ScriptDirectory(str(revisions.MIGRATIONS))
    assert len(script.get_heads()) == 1
    assert all(not revision.is_merge_point for revision in script.walk_revisions())


def test_a_new_revision_is_written_from_our_template(tmp_path: Path) -> None:
    for file in ("env.py", "script.py.mako"):
        (tmp_path / file).write_text((revisions.MIGRATIONS / file).read_text())
    (tmp_path / "versions").mkdir()
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    script = command.revision(config, "Add a table", rev_id="0001")
    assert script is not None
    assert not isinstance(script, list)
    source = Path(script.path).read_text()
    compile(source, script.path, "exec")
    assert source.startswith('"""Add a table."""')
    assert "down_revision = None" in source


def test_reads_the_url_from_the_environment(
    url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_DATABASE", url)
    config = Config()
    config.set_main_option("script_location", str(revisions.MIGRATIONS))
    command.upgrade(config, "head")
    database.check_revision()
