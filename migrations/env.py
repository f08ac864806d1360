"""How alembic runs our migrations: in one transaction, one migrator at a time.

The URL comes from the caller's `Config.attributes["url"]` or from LORAPLEX_DATABASE.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection, text

from loraplex.platform.database import make_engine
from loraplex.platform.models import Base

ADVISORY_LOCK = 0x10_4A_91_EC
"""Any number, as long as nothing else in the database locks it."""
LOCK_TIMEOUT = "5s"
"""A migration that cannot have its table soon gives up, before requests queue up behind it."""


def run() -> None:
    """Migrate."""
    url = context.config.attributes.get("url") or os.environ["LORAPLEX_DATABASE"]
    engine = make_engine(url, enforce_foreign_keys=False)
    try:
        with engine.connect() as connection:
            _migrate(connection)
    finally:
        engine.dispose()


def _migrate(connection: Connection) -> None:
    is_sqlite = connection.dialect.name == "sqlite"
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=is_sqlite,
        transactional_ddl=True,  # alembic doubts it of SQLite; our engine begins for itself
    )
    # The lock is taken inside alembic's transaction: one that was begun before `configure` would
    # make alembic leave the commit to us, and roll everything back without a word.
    with context.begin_transaction():
        if not is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
            connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
        context.run_migrations()
        if is_sqlite:
            _check_foreign_keys(connection)


def _check_foreign_keys(connection: Connection) -> None:
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    if broken:
        raise RuntimeError(f"the migration broke references: {broken[:10]}")


run()
