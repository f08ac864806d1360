"""`loraplex db`: manages the database schema."""

from __future__ import annotations

import typer

from ...platform.keyring import secret_id
from ...platform.revisions import head_revision
from ...platform.secret_use import Needs, count_needs
from .admin import open_current_database, open_database
from .output import AsJson, note, print_json, print_rows
from .setting_options import DatabaseUrl, DataDir
from .setting_sources import ConfigFile, settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("upgrade")
def upgrade(
    context: typer.Context,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Upgrade the schema to the newest revision; creates the embedded database if missing."""
    with open_database(settings_of(context, database=database, data_dir=data_dir)) as opened:
        before = opened.current_revision()
        opened.upgrade()
        after = opened.current_revision()
    _print_revision(after, as_json=as_json)
    note("The schema was up to date." if before == after else f"Upgraded the schema to {after}.")


@app.command("current")
def current(
    context: typer.Context,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the schema's revision."""
    with open_database(settings_of(context, database=database, data_dir=data_dir)) as opened:
        revision = opened.current_revision()
    _print_revision(revision, as_json=as_json)


@app.command("secrets")
def secrets(
    context: typer.Context,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what each server secret is still needed for. Keys migrate to the current secret when
    they are used. A secret that nothing needs can be removed."""
    settings = settings_of(context, database=database, data_dir=data_dir)
    present, *previous = map(secret_id, settings.load_secrets())
    with open_current_database(settings) as opened:
        needs = count_needs(opened)
    rows = [
        {"secret": name, "status": _status(name, present, previous), **counts._asdict()}
        for name, counts in needs.items()
    ]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, ["secret", "status", *Needs._fields])


def _status(name: str, present: str, previous: list[str]) -> str:
    return "present" if name == present else "previous" if name in previous else "missing"


def _print_revision(revision: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"revision": revision, "head": head_revision()})
    else:
        typer.echo(revision or "none")
