"""What the commands share that work on the database directly, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ...platform.database import Database, database_name, failure_reason
from ...platform.errors import DatabaseUnavailable, RevisionMismatch, RowSecurityMissing
from ..settings import Settings
from .exit_codes import CommandFailed, ExitCode

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="LORAPLEX_DATABASE",
        help="SQLAlchemy URL of the database.",
        show_default="SQLite in the data folder",
    ),
]


DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="LORAPLEX_DATA_DIR",
        help="Home of the embedded database, store and secret.",
        show_default="in the user's data folder",
    ),
]


@contextmanager
def open_database(settings: Settings) -> Iterator[Database]:
    """The database, whatever its revision. Failures name it."""
    settings.prepare_data_dir()
    database = Database(settings.database_url)
    try:
        with naming_the_database(settings):
            yield database
    finally:
        database.close()


@contextmanager
def naming_the_database(settings: Settings) -> Iterator[None]:
    """Failures of the database become CommandFailed, which says which one it is and why."""
    try:
        yield
    except (DatabaseUnavailable, RevisionMismatch, RowSecurityMissing) as exc:
        reason = failure_reason(exc) if isinstance(exc, DatabaseUnavailable) else str(exc)
        name = database_name(settings.database_url)
        raise CommandFailed(f"{name}: {reason}", ExitCode.UNAVAILABLE) from exc


@contextmanager
def open_current_database(settings: Settings) -> Iterator[Database]:
    """The database with the schema that this software knows."""
    with open_database(settings) as database:
        database.check_revision()
        yield database


def moment(value: datetime | None) -> str | None:
    """A time as commands print it."""
    return None if value is None else value.isoformat(timespec="seconds")
