"""Revision 0002 with data: what was there gets a history, and loses nothing on the way back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, column, inspect, table, text
from sqlalchemy.sql.expression import ColumnClause

from loraplex.platform import revisions
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.canary import Canary
from loraplex.platform.adapters.listing import AdapterQuery, list_summaries
from loraplex.platform.adapters.states import AliasAction, UploadState, VersionState
from loraplex.platform.base import UtcDateTime
from loraplex.platform.database import Database, make_engine
from loraplex.platform.errors import NothingToRollBack
from support.catalog import make_version
from support.databases import new_postgres_url, new_sqlite_url
from support.uploads import abandon_stale

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
TENANT = "tenant"
STATES = [state.value for state in VersionState]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database at revision 0001, with an adapter of each kind in it."""
    opened = new_sqlite_url(tmp_path) if request.param == "sqlite" else new_postgres_url()
    with opened as url:
        revisions.upgrade(url, "0001")
        engine = make_engine(url)
        with engine.begin() as connection:
            for name, row in old_rows():
                connection.execute(table(name, *columns_of(row)).insert(), row)
        engine.dispose()
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


def old_rows() -> Iterator[tuple[str, dict[str, object]]]:
    """`bot` has a version in each state, `ready` aliased; of `gone` nothing is left."""
    yield "tenants", {"id": TENANT, "slug": "acme", "created_at": BEGIN}
    for name in ("bot", "gone", "leaving"):
        yield (
            "adapters",
            {"id": name, "tenant_id": TENANT, "name": name, "created_at": BEGIN},
        )
    for number, state in enumerate(STATES, 1):
        yield "adapter_versions", old_version("bot", number, state)
    yield "adapter_versions", old_version("gone", 1, "deleted")
    yield "adapter_versions", old_version("leaving", 1, "deleting")
    alias = {"id": "alias", "tenant_id": TENANT, "adapter_id": "bot", "name": "prod"}
    yield "adapter_aliases", {**alias, "version_id": "bot-ready", "updated_at": BEGIN + 3 * HOUR}
    for state in UploadState:
        yield (
            "uploads",
            {
                "id": state.value,
                "tenant_id": TENANT,
                "adapter_name": "bot",
                "config_json": "{}",
                "size_bytes": 10,
                "sha256": "ab" * 32,
                "received_bytes": 5,
                "aliases": "[]",
                "state": state.value,
                "created_at": BEGIN + HOUR,
            },
        )


def columns_of(row: dict[str, object]) -> Iterator[ColumnClause[object]]:
    """The columns to insert; moments are to be written as the product writes them."""
    for name, value in row.items():
        yield column(name, UtcDateTime()) if isinstance(value, datetime) else column(name)


def old_version(adapter: str, number: int, state: str) -> dict[str, object]:
    is_rejected = state == "rejected"
    return {
        "id": f"{adapter}-{state}",
        "tenant_id": TENANT,
        "adapter_id": adapter,
        "number": number,
        "digest": f"sha256:{adapter}-{state}",
        "base_id": "base",
        "object_sha256": "ab" * 32,
        "size_bytes": 7,
        "state": state,
        "state_changed_at": BEGIN + 2 * HOUR,
        "reason_code": "no_effect" if is_rejected else None,
        "reason_message": "It does nothing." if is_rejected else None,
        "intake_report": "{}",
        "created_at": BEGIN,
    }


def read_tables(engine: Engine) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table that revision 0001 has, with its columns of then."""
    tables = {}
    with engine.connect() as connection:
        inspector = inspect(connection)
        for name in inspector.get_table_names():
            columns = ", ".join(sorted(each["name"] for each in inspector.get_columns(name)))
            rows = connection.execute(text(f"SELECT {columns} FROM {name}"))
            tables[name] = sorted((tuple(row) for row in rows), key=repr)
    return tables


def test_versions_get_a_history_from_what_is_known(url: str, database: Database) -> None:
    database.upgrade()
    with database.transaction(TENANT, read_only=True) as session:
        for number, state in enumerate(STATES, 1):
            expected: list[tuple[object, ...]] = [("validated", None, None, BEGIN)]
            if state == "rejected":
                expected.append((state, "no_effect", "It does nothing.", BEGIN + 2 * HOUR))
            elif state != "validated":
                expected.append((state, None, None, BEGIN + 2 * HOUR))
            assert [
                (each.state, each.reason_code, each.reason_message, each.at)
                for each in catalog.list_transitions(session, "bot", number)
            ] == expected


def test_histories_go_on(url: str, database: Database) -> None:
    database.upgrade()
    with database.transaction(TENANT) as session:
        catalog.mark_ready(session, "bot-attesting", attestation_report={})
        states = [each.state for each in catalog.list_transitions(session, "bot", 2)]
        assert states == ["validated", "attesting", "ready"]
        catalog.finish_deletion(session, "leaving-deleting", receipt={"device_bytes": 1})
        (receipt,) = catalog.list_receipts(session, "leaving")
        assert receipt.requested_at == BEGIN + 2 * HOUR


def test_aliases_get_the_change_that_set_them(url: str, database: Database) -> None:
    database.upgrade()
    with database.transaction(TENANT) as session:
        (change,) = catalog.list_alias_changes(session, "bot", "prod")
        assert (change.action, change.version_number, change.changed_at) == (
            AliasAction.SET,
            STATES.index("ready") + 1,
            BEGIN + 3 * HOUR,
        )
        with pytest.raises(NothingToRollBack):
            catalog.rollback_alias(session, "bot", "prod")
        make_version(session, "bot", "new", base_id="base")
        catalog.set_alias(session, "bot", "prod", len(STATES) + 1)
        assert catalog.rollback_alias(session, "bot", "prod").version_id == "bot-ready"


def test_what_was_deleted_stays_hidden(url: str, database: Database) -> None:
    database.upgrade()
    with database.transaction(TENANT, read_only=True) as session:
        listed = list_summaries(session, AdapterQuery(), limit=10)
        assert [entry.adapter.name for entry in listed] == ["bot"]


def test_uploads_are_as_old_as_they_are(url: str, database: Database) -> None:
    database.upgrade()
    assert abandon_stale(database, BEGIN + HOUR) == []
    assert abandon_stale(database, BEGIN + 1.01 * HOUR) == ["receiving"]


def test_nothing_of_before_is_lost_on_the_way_back(
    url: str, engine: Engine, database: Database
) -> None:
    before = read_tables(engine)
    assert len(before["adapter_versions"]) == len(STATES) + 2
    schema = read_schema(engine)
    database.upgrade()
    revisions.downgrade(url, "0001")
    after = read_tables(engine)
    assert after == before
    assert read_schema(engine) == schema


def test_a_canary_ends_on_the_way_back(url: str, engine: Engine, database: Database) -> None:
    database.upgrade()
    with database.transaction(TENANT) as session:
        make_version(session, "bot", "new", base_id="base")
        ready = STATES.index("ready") + 1
        catalog.set_alias(session, "bot", "prod", ready, canary=Canary(len(STATES) + 1, 10))
    database.close()
    revisions.downgrade(url, "0001")
    with engine.connect() as connection:
        aliases = connection.execute(text("SELECT name, version_id FROM adapter_aliases")).all()
        assert [tuple(alias) for alias in aliases] == [("prod", "bot-ready")]
    database.upgrade()
    with database.transaction(TENANT, read_only=True) as session:
        (alias,) = catalog.get_adapter(session, "bot").aliases
        assert (alias.version_id, alias.canary_version_id) == ("bot-ready", None)


def read_schema(engine: Engine) -> dict[str, object]:
    """Columns, keys, checks and indexes of each table."""
    with engine.connect() as connection:
        inspector = inspect(connection)
        return {
            name: (
                sorted((each["name"], each["nullable"]) for each in inspector.get_columns(name)),
                sorted(str(each["name"]) for each in inspector.get_foreign_keys(name)),
                sorted(str(each["name"]) for each in inspector.get_unique_constraints(name)),
                sorted(
                    (str(each["name"]), each["sqltext"])
                    for each in inspector.get_check_constraints(name)
                ),
                sorted(
                    (str(each["name"]), tuple(each["column_names"]))
                    for each in inspector.get_indexes(name)
                ),
            )
            for name in inspector.get_table_names()
        }
