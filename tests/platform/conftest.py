"""Every test that takes `database` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.platform.database import Database
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant
from support.databases import (
    copy_of_migrated_postgres,
    copy_of_migrated_sqlite,
    empty_all_tables,
)


@pytest.fixture(scope="session")
def sqlite_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A migrated SQLite database, shared by the tests one after another."""
    database = Database(copy_of_migrated_sqlite(tmp_path_factory.mktemp("sqlite")))
    yield database
    database.close()


@pytest.fixture(scope="session")
def postgres_database() -> Iterator[Database]:
    """A migrated PostgreSQL database, shared by the tests one after another."""
    with copy_of_migrated_postgres() as url:
        database = Database(url)
        yield database
        database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Database:
    """A migrated, empty database. Shared, so that statements are compiled once for all tests."""
    shared: Database = request.getfixturevalue(f"{request.param}_database")
    empty_all_tables(shared)
    return shared


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A migrated SQLite file of the test's own."""
    return copy_of_migrated_sqlite(tmp_path)


@pytest.fixture
def acme(database: Database) -> Tenant:
    """A tenant."""
    return make_tenant(database, "acme")


@pytest.fixture
def bolt(database: Database) -> Tenant:
    """Another tenant."""
    return make_tenant(database, "bolt")
