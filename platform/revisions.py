"""The schema's revisions: the current one, the required one, and upgrades."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from threading import Lock

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from .errors import RevisionMismatch

MIGRATIONS = Path(__file__).parents[1] / "migrations"
"""Next to this package, in a checkout and in an installed wheel."""
_ALEMBIC = Lock()
"""Alembic keeps its migration context in a module, shared by all threads."""


def upgrade(url: str, revision: str = "head") -> None:
    """Migrate the database forward, in one transaction."""
    with _ALEMBIC:
        command.upgrade(_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Migrate the database back; `base` is before the first revision."""
    with _ALEMBIC:
        command.downgrade(_config(url), revision)


def current_revision(connection: Connection) -> str | None:
    """The revision recorded in the database."""
    return MigrationContext.configure(connection).get_current_revision()


@cache
def head_revision() -> str:
    """The newest revision that this software brings along."""
    head = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert head is not None, "no migrations in the package"
    return head


def check_revision(current: str | None) -> None:
    """Raise RevisionMismatch unless `current` is the head."""
    head = head_revision()
    if current == head:
        return
    raise RevisionMismatch(_advice(current, head), current=current, head=head)


def check_known(current: str | None) -> None:
    """Raise RevisionMismatch for an unknown revision."""
    if current is not None and current not in _known_revisions():
        check_revision(current)


def _advice(current: str | None, head: str) -> str:
    if current is None:
        return "The database has no schema yet: run `loraplex db upgrade`."
    if current in _known_revisions():
        return f"The database is at {current}, not {head}: run `loraplex db upgrade`."
    return (
        f"The database is at {current}, a revision of another version of this software: run "
        "that version, or use another database."
    )


def _known_revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}


def _config(url: str) -> Config:
    config = Config(attributes={"url": url})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
