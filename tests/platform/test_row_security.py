"""PostgreSQL restricts each tenant to its rows, whatever SQL a tenant's transaction runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, Table, create_engine, inspect, make_url, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from loraplex.platform import revisions, row_security
from loraplex.platform.base import TenantOwned
from loraplex.platform.database import Database
from loraplex.platform.errors import RowSecurityMissing
from loraplex.platform.models import Base
from loraplex.platform.row_security import TENANT_ROLE, confine
from support.databases import empty_all_tables, new_postgres_url
from support.filled_tables import fill_tables, row_of

OWN, FOREIGN, NEW = 0, 1, 2
"""Numbers of rows: what belongs to two tenants, and what is not there yet."""

OWNED = sorted(
    str(inspect(mapper.class_).local_table)
    for mapper in Base.registry.mappers
    if issubclass(mapper.class_, TenantOwned)
)
PLATFORMS = sorted(set(Base.metadata.tables) - set(OWNED) - {"tenants"})


def table_of(name: str) -> Table:
    return Base.metadata.tables[name]


@pytest.fixture(scope="module")
def filled(postgres_database: Database) -> Database:
    """Two rows in every table: row 0 belongs to tenant 0, row 1 to tenant 1."""
    empty_all_tables(postgres_database)
    with postgres_database.platform_transaction() as session:
        fill_tables(session.connection(), 2)
    return postgres_database


def tenant_of(number: int) -> str:
    return str(row_of(table_of("tenants"), number)["id"])


@contextmanager
def raw(database: Database, number: int = OWN) -> Iterator[Connection]:
    """A tenant's transaction from below the session, where any SQL passes; undone in the end."""
    with database.transaction(tenant_of(number)) as session:
        connection = session.connection()
        yield connection
        session.rollback()


@pytest.mark.parametrize("name", OWNED)
def test_sees_its_own_rows_alone(filled: Database, name: str) -> None:
    with raw(filled) as connection:
        tenants = connection.execute(text(f"SELECT tenant_id FROM {name}")).scalars().all()
    assert tenants == [tenant_of(OWN)]


def test_plain_statements_are_kept_to_the_tenant_too_and_leave_nothing_behind(
    filled: Database,
) -> None:
    every_quota = text("SELECT tenant_id FROM quotas")
    everybody = sorted(tenant_of(number) for number in (OWN, FOREIGN))
    for number in (OWN, FOREIGN):
        with filled.statements(tenant_of(number)) as statements:
            found = statements.connection().execute(every_quota)
            assert found.scalars().all() == [tenant_of(number)]
        with filled.platform_transaction() as session:  # on the same pooled connection
            found = session.connection().execute(every_quota)
            assert sorted(found.scalars()) == everybody


@pytest.mark.parametrize("name", OWNED)
def test_changes_and_removes_no_foreign_row(filled: Database, name: str) -> None:
    foreign = f"WHERE tenant_id = '{tenant_of(FOREIGN)}'"
    for statement in (
        f"UPDATE {name} SET tenant_id = tenant_id {foreign}",
        f"DELETE FROM {name} {foreign}",
    ):
        with raw(filled) as connection:
            if name == "audit_entries":
                with pytest.raises(ProgrammingError, match="permission denied"):
                    connection.execute(text(statement))
            else:
                assert connection.execute(text(statement)).rowcount == 0


@pytest.mark.parametrize("name", OWNED)
def test_gives_no_row_to_another_tenant(filled: Database, name: str) -> None:
    with (
        raw(filled, OWN) as connection,
        pytest.raises(ProgrammingError, match="row-level security"),
    ):
        connection.execute(table_of(name).insert(), [row_of(table_of(name), FOREIGN)])


@pytest.mark.parametrize("name", sorted(set(OWNED) - {"audit_entries"}))
def test_gives_none_of_its_rows_away(filled: Database, name: str) -> None:
    with (
        raw(filled) as connection,
        pytest.raises(ProgrammingError, match="row-level security"),
    ):
        connection.execute(text(f"UPDATE {name} SET tenant_id = '{tenant_of(FOREIGN)}'"))


def test_writes_down_what_happened_and_never_changes_it(filled: Database) -> None:
    entries = table_of("audit_entries")
    numbers = select(entries.c.number).order_by(entries.c.number)
    with raw(filled) as connection:
        connection.execute(entries.insert(), [{**row_of(entries, OWN), "number": 7}])
        assert connection.execute(numbers).scalars().all() == [1, 7]


@pytest.mark.parametrize("name", PLATFORMS)
def test_has_no_access_to_what_is_the_platforms(filled: Database, name: str) -> None:
    with raw(filled) as connection, pytest.raises(ProgrammingError, match="permission denied"):
        connection.execute(text(f"SELECT * FROM {name}"))


def test_sees_and_locks_its_own_tenant_and_changes_none(filled: Database) -> None:
    with raw(filled) as connection:
        locked = connection.execute(text("SELECT id FROM tenants FOR NO KEY UPDATE"))
        assert locked.scalars().all() == [tenant_of(OWN)]
        with pytest.raises(ProgrammingError, match="row-level security"):
            connection.execute(text("UPDATE tenants SET weight = 100"))


def test_without_a_tenant_the_role_sees_nothing(filled: Database) -> None:
    with raw(filled) as connection:
        connection.execute(text("SELECT set_config('app.tenant', '', true)"))
        for name in OWNED:
            assert connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() == 0


@pytest.mark.parametrize("ends", ["commits", "rolls back", "fails"])
def test_nothing_is_left_on_a_pooled_connection(filled: Database, ends: str) -> None:
    engine = create_engine(filled._url, pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        before = connection.execute(text("SELECT current_user")).scalar_one()
        connection.rollback()
        confine(connection, tenant_of(OWN))
        assert connection.execute(text("SELECT current_user")).scalar_one() == TENANT_ROLE
        if ends == "fails":
            with pytest.raises(DBAPIError):
                connection.execute(text("SELECT 1 / 0"))
        if ends == "commits":
            connection.commit()
    with engine.connect() as connection:
        now = connection.execute(text("SELECT current_user, current_setting('app.tenant', true)"))
        assert now.one() == (before, "")
        assert connection.execute(text("SELECT count(*) FROM adapters")).scalar_one() == 2
    engine.dispose()


def test_savepoints_keep_the_tenant(filled: Database) -> None:
    with filled.transaction(tenant_of(OWN)) as session:
        with session.begin_nested():
            pass
        users = session.connection().execute(text("SELECT current_user")).scalar_one()
    assert users == TENANT_ROLE


def test_who_may_not_make_the_role_is_told_what_is_missing() -> None:
    with new_postgres_url() as url, restricted_user(url) as restricted_url:
        with pytest.raises(RowSecurityMissing, match="GRANT loraplex_tenant TO"):
            revisions.upgrade(restricted_url)
        database = Database(restricted_url)
        assert database.current_revision() is None
        with in_autocommit(url) as connection:
            connection.execute(text(f"GRANT {TENANT_ROLE} TO {make_url(restricted_url).username}"))
        database.upgrade()
        database.check_revision()
        with in_autocommit(url) as connection:
            user = make_url(restricted_url).username
            connection.execute(text(f"REVOKE {TENANT_ROLE} FROM {user}"))
        with pytest.raises(RowSecurityMissing):
            database.check_revision()
        database.close()


def test_a_server_without_the_role_is_told_what_is_missing(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that a backup was brought to: roles are no part of a database."""
    monkeypatch.setattr(row_security, "TENANT_ROLE", "nobody_made_this")
    with pytest.raises(RowSecurityMissing):
        postgres_database.check_revision()


@contextmanager
def in_autocommit(url: str) -> Iterator[Connection]:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def restricted_user(url: str) -> Iterator[str]:
    """The database's URL for its owner, who may make no roles."""
    parsed = make_url(url)
    user = f"user_{parsed.database}"[:60]
    with in_autocommit(url) as connection:
        connection.execute(text(f"CREATE USER {user} PASSWORD 'secret'"))
        connection.execute(text(f"ALTER DATABASE {parsed.database} OWNER TO {user}"))
        connection.execute(text(f"ALTER SCHEMA public OWNER TO {user}"))
    try:
        yield parsed.set(username=user, password="secret").render_as_string(hide_password=False)
    finally:
        with in_autocommit(url) as connection:
            connection.execute(text(f"DROP OWNED BY {user} CASCADE"))
            connection.execute(text(f"ALTER DATABASE {parsed.database} OWNER TO CURRENT_USER"))
            connection.execute(text(f"DROP USER {user}"))
