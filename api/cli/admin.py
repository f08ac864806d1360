"""What the commands share that work on the database directly, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer

from ...platform.database import Database
from ..settings import Settings

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="LORAPLEX_DATABASE",
        help="SQLAlchemy URL of the database.",
        show_default="SQLite in the data folder",
    ),
]


def load_settings(database_url: str | None) -> Settings:
    """The settings of the environment, with the command's database if it names one."""
    return Settings() if database_url is None else Settings(database=database_url)


@contextmanager
def open_database(settings: Settings) -> Iterator[Database]:
    """The database, whatever its revision."""
    settings.prepare_data_dir()
    database = Database(settings.database_url)
    try:
        yield database
    finally:
        database.close()


@contextmanager
def open_current_database(settings: Settings) -> Iterator[Database]:
    """The database with the schema that this software knows. Raises RevisionMismatch."""
    with open_database(settings) as database:
        database.check_revision()
        yield database


def moment(value: datetime | None) -> str | None:
    """A time as commands print it."""
    return None if value is None else value.isoformat(timespec="seconds")
