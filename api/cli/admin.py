"""Shared code of the commands that use the database directly, without a server."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ...platform.database import Database, database_name, failure_reason
from ...platform.errors import DatabaseUnavailable, RevisionMismatch, RowSecurityMissing
from ..server.running_servers import RunningServer, list_running_servers
from ..settings import Settings, load_settings
from .exit_codes import CommandFailed, ExitCode
from .output import note


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
    """Convert database failures to CommandFailed, with the database and the reason."""
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


def settings_beside_server(settings: Settings) -> Settings:
    """The settings of a command that works on the same data as the server of this user.

    Where no option, variable or settings file names a place, the one server that runs decides.
    Raises CommandFailed if that is ambiguous or if the server's database has to be named.
    """
    servers = list_running_servers()
    named = settings.model_fields_set & {"database", "data_dir"}
    if named or not servers or str(settings.data_dir) in {server.data_dir for server in servers}:
        return settings
    server, *others = servers
    if others:
        listed = "".join(f"\n  --data-dir {shlex.quote(server.data_dir)}" for server in servers)
        raise CommandFailed(
            f"{len(servers)} servers run here. Name the data folder of one:{listed}",
            ExitCode.USAGE,
        )
    if not server.has_embedded_database:
        raise CommandFailed(
            f"The server at {server.url} has its database from --database or LORAPLEX_DATABASE: "
            f"add the same --database, and --data-dir {shlex.quote(server.data_dir)}.",
            ExitCode.USAGE,
        )
    note(f"Using {server.data_dir}, the data folder of the server at {server.url}.")
    return load_settings(data_dir=Path(server.data_dir))


def describe_running_server(settings: Settings, url: str) -> RunningServer:
    """How a server with these settings is found by other commands."""
    return RunningServer(url, str(settings.data_dir), settings.is_database_embedded)


def moment(value: datetime | None) -> str | None:
    """A time as commands print it."""
    return None if value is None else value.isoformat(timespec="seconds")
