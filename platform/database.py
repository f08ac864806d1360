"""The database of record, with its units of work.

`transaction` and `platform_transaction` are the units of work: all changes in one are committed
together at the end, or not at all. SQLite is the embedded default; PostgreSQL is also supported.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from . import models as _models  # noqa: F401  # all tables, or references to one are unknown
from . import revisions, row_security
from .errors import (
    DatabaseBusy,
    DatabaseDamaged,
    DatabaseFull,
    DatabaseUnavailable,
    InvalidValue,
)
from .row_security import confine
from .sessions import Guard, PlatformSession, TenantSession, TenantStatements, UnitOfWork
from .writer_queue import WriterQueue

BUSY_TIMEOUT_MS = 5000
"""How long a SQLite writer waits for writers of other processes."""
QUEUE_SECONDS = 30.0
"""How long a writer waits for others of its own process. They are served in order, so only a disk
that hangs takes this long, or a store that hangs while a block is removed from it."""
WAL_RETRY_SECONDS = 0.01
_PRIMARY_CODE = 0xFF
"""Of SQLite's error codes, whose other bits are details, such as SQLITE_BUSY_RECOVERY."""
POSTGRES_OPTIONS = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""libpq connection parameters, so that a host that disappeared does not block forever."""
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_DISK_FULL = "53100"
"""PostgreSQL's code."""
_LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's code for a wait that exceeded `lock_timeout`."""
DRIVERS = frozenset({"sqlite", "sqlite+pysqlite", "postgresql+psycopg"})
OTHER_NAMES = frozenset({"postgres", "postgresql", "postgresql+psycopg2", "postgresql+asyncpg"})
"""How others name PostgreSQL."""

AnyUnitOfWork = TypeVar("AnyUnitOfWork", bound=UnitOfWork)


class Database:
    """Opens units of work. Safe to share between threads; connects on first use."""

    def __init__(self, url: str) -> None:
        """`url` as SQLAlchemy writes it: `sqlite:///…` or `postgresql+psycopg://…`.

        Raises InvalidValue if it is neither, or if its driver is not installed.
        """
        self._url = url
        self._writing = make_engine(url)
        self._reading = _make_reading(self._writing)
        self._writers = WriterQueue(QUEUE_SECONDS)

    @contextmanager
    def transaction(
        self, tenant_id: str, *, read_only: bool = False, guard: Guard | None = None
    ) -> Iterator[TenantSession]:
        """A unit of work on one tenant's rows.

        A reader sees one moment, whatever is committed meanwhile. It neither waits for SQLite's
        writers nor holds them up; its writes raise ScopeViolation. Raises DatabaseUnavailable when
        the database does not answer, DatabaseBusy when it is only held by others, InvalidValue for
        a value that it cannot hold, and what `guard` raises.
        """
        engine = self._engine(read_only)
        session = TenantSession(engine, tenant_id=tenant_id, read_only=read_only, guard=guard)
        with self._queue(read_only), _unit_of_work(session):
            yield session

    @contextmanager
    def statements(self, tenant_id: str) -> Iterator[TenantStatements]:
        """A unit of work of plain statements on one tenant's rows; otherwise like `transaction`."""
        with self._queue(False), _errors_told(), self._writing.begin() as connection:
            confine(connection, tenant_id)
            yield TenantStatements(connection, tenant_id)

    @contextmanager
    def platform_transaction(
        self, *, read_only: bool = False, guard: Guard | None = None
    ) -> Iterator[PlatformSession]:
        """A unit of work on the rows of all tenants; otherwise like `transaction`."""
        session = PlatformSession(self._engine(read_only), read_only=read_only, guard=guard)
        with self._queue(read_only), _unit_of_work(session):
            yield session

    def upgrade(self) -> None:
        """Upgrade the schema to the newest revision; no effect if it is current.

        Of several concurrent callers one does the work and the others wait. Raises RevisionMismatch
        for the schema of another version of this software.
        """
        revisions.check_known(self.current_revision())
        with _unavailable_if_unanswered():
            revisions.upgrade(self._url)

    def current_revision(self) -> str | None:
        """The schema's revision; None for a database without one, which is not made by asking."""
        if _is_missing_file(make_url(self._url)):
            return None
        with _unavailable_if_unanswered(), self._reading.connect() as connection:
            return revisions.current_revision(connection)

    def check_revision(self) -> None:
        """Raise RevisionMismatch unless the schema is exactly the one this software knows.

        Raises RowSecurityMissing if tenants cannot be confined to their rows (PostgreSQL).
        """
        revisions.check_revision(self.current_revision())
        with _unavailable_if_unanswered(), self._reading.connect() as connection:
            row_security.check_role(connection)

    def ping(self) -> None:
        """Run a simple query. Raises DatabaseUnavailable."""
        with _unavailable_if_unanswered(), self._reading.connect() as connection:
            connection.exec_driver_sql("SELECT 1")

    def close(self) -> None:
        """Close the idle connections."""
        self._writing.dispose()

    def _queue(self, read_only: bool) -> AbstractContextManager[None]:
        """The queue of SQLite's writers; other units of work do not wait."""
        is_shared = read_only or self._writing.dialect.name != "sqlite"
        return nullcontext() if is_shared else self._writers.wait()

    def _engine(self, read_only: bool) -> Engine:
        return self._reading if read_only else self._writing


def make_engine(url: str, *, enforce_foreign_keys: bool = True) -> Engine:
    """An engine with the settings for its database. Raises InvalidValue.

    Only migrations disable SQLite's foreign keys, because they alter a table by copying it.
    """
    if _parse_url(url).get_backend_name() == "sqlite":
        return _make_sqlite_engine(url, enforce_foreign_keys=enforce_foreign_keys)
    try:
        return create_engine(url, pool_pre_ping=True, connect_args=POSTGRES_OPTIONS)
    except ModuleNotFoundError as exc:
        raise InvalidValue(f"PostgreSQL needs the package {exc.name}.", param="database") from exc


def _make_reading(engine: Engine) -> Engine:
    """The same for readers. Of SQLite every transaction sees one moment; PostgreSQL is asked to."""
    reading = engine.execution_options(read_only=True)
    if engine.dialect.name == "postgresql":
        return reading.execution_options(isolation_level="REPEATABLE READ")
    return reading


def database_name(url: str) -> str:
    """The database's name for messages: without the password and options."""
    return make_url(url).set(query={}).render_as_string(hide_password=True)


def failure_reason(error: DatabaseUnavailable) -> str:
    """The first line of the driver's error message, for operators."""
    original = getattr(error.__cause__, "orig", None)
    reason = next(iter(str(original or error).splitlines()), str(error))
    if isinstance(error, DatabaseDamaged):
        reason += "; restore it from a backup, or name another --database or --data-dir"
    return reason


def _make_sqlite_engine(url: str, *, enforce_foreign_keys: bool) -> Engine:
    engine = create_engine(url)
    pragmas = (
        "synchronous=FULL",  # committed data survives a crash of the machine
        f"foreign_keys={'ON' if enforce_foreign_keys else 'OFF'}",
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        # The driver must not begin transactions: it begins them late, and never with IMMEDIATE, so
        # that a read-modify-write could fail at its first write.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        _write_ahead(connection)
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        is_reader = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Enable write-ahead logging.

    If several connections open a new file at once, each wants to change the mode, and SQLite does
    not let them wait for each other, so a refused one tries again.
    """
    give_up_at = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= give_up_at:
                raise
            time.sleep(WAL_RETRY_SECONDS)


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the latter from its port
        parsed = None
    if parsed is not None and parsed.drivername in OTHER_NAMES:
        raise InvalidValue(
            "Unsupported database URL. Write postgresql+psycopg://USER@HOST/NAME in place of "
            f"{parsed.drivername}://USER@HOST/NAME.",
            param="database",
        )
    if parsed is None or parsed.drivername not in DRIVERS:
        # The value is not repeated: it may hold a password.
        raise InvalidValue(
            "Unsupported database URL. Use sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME.",
            param="database",
        )
    return parsed


def _is_missing_file(url: URL) -> bool:
    """An SQLite file that connecting would make, empty."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return False
    path = Path(url.database or "")
    is_file_uri = path.parts[0].startswith("file:")
    return not is_file_uri and path.parent.is_dir() and not path.exists()


@contextmanager
def _unit_of_work(session: AnyUnitOfWork) -> Iterator[AnyUnitOfWork]:
    with _errors_told(), session, session.begin():
        yield session


@contextmanager
def _errors_told() -> Iterator[None]:
    try:
        with _unavailable_if_unanswered():
            yield
    except DataError as exc:
        # PostgreSQL stores no NUL in text, so the client sent one.
        raise InvalidValue(
            "A value contains a character that the database cannot store, such as NUL.", param=None
        ) from exc


@contextmanager
def _unavailable_if_unanswered() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as exc:
        raise _kind(exc) from exc
    except DBAPIError as exc:
        if _is_damage(exc):
            raise DatabaseDamaged from exc
        if exc.connection_invalidated:
            raise DatabaseUnavailable from exc
        raise


def _is_damage(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code is not None and code & _PRIMARY_CODE in _DAMAGE


def _kind(error: SQLAlchemyError) -> type[DatabaseUnavailable]:
    """The kind of a driver error, by the codes of SQLite or PostgreSQL."""
    original = getattr(error, "orig", None)
    code: int = getattr(original, "sqlite_errorcode", 0)
    sqlstate = getattr(original, "sqlstate", None)
    if code & _PRIMARY_CODE == sqlite3.SQLITE_BUSY:
        return DatabaseBusy  # its one place for writers was not free within BUSY_TIMEOUT_MS
    if sqlstate == _LOCK_NOT_AVAILABLE:
        return DatabaseBusy
    if code in _SQLITE_FULL or sqlstate == _DISK_FULL:
        return DatabaseFull
    return DatabaseUnavailable
