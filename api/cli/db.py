"""`loraplex db`: the database's schema."""

from __future__ import annotations

import typer

from ...platform.revisions import head_revision
from ..settings import load_settings
from .admin import DatabaseUrl, DataDir, open_database
from .output import AsJson, note, print_json

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("upgrade")
def upgrade(
    database: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Bring the schema to the newest revision; makes the embedded database if there is none."""
    with open_database(load_settings(database=database, data_dir=data_dir)) as opened:
        before = opened.current_revision()
        opened.upgrade()
        after = opened.current_revision()
    _print_revision(after, as_json=as_json)
    note("The schema was up to date." if before == after else f"Upgraded the schema to {after}.")


@app.command("current")
def current(
    database: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Print the schema's revision."""
    with open_database(load_settings(database=database, data_dir=data_dir)) as opened:
        revision = opened.current_revision()
    _print_revision(revision, as_json=as_json)


def _print_revision(revision: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"revision": revision, "head": head_revision()})
    else:
        typer.echo(revision or "none")
