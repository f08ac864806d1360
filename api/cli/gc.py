"""`loraplex gc`: removes unreferenced objects and uploads, with or without a running server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from ...adapters.errors import AdapterError
from ...adapters.store import open_store
from ...platform.errors import InvalidValue
from ..adapters.staging import Staging
from ..control_plane.control_plane import ControlPlane
from ..settings import Settings
from ..upkeep.garbage import GRACE_SECONDS, Collected, Garbage
from .admin import open_current_database
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json
from .setting_options import DatabaseUrl, DataDir, StoreUrl
from .setting_sources import ConfigFile, settings_of

app = typer.Typer(add_completion=False)

MAX_GRACE_HOURS = 24 * 3660.0
"""Ten years: longer than anything waits, and a time that a calendar can hold."""


@app.command()
def gc(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    grace_hours: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_GRACE_HOURS,
            help="Keep newer objects: they may belong to a running push.",
        ),
    ] = GRACE_SECONDS / 3600,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove objects that no version or file references, expired files and
    responses, and abandoned uploads."""
    settings = settings_of(context, database=database, data_dir=data_dir, store=store)
    try:
        collected = asyncio.run(_collect(settings, grace_hours * 3600, dry_run=dry_run))
    except AdapterError as exc:
        raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc
    except ValueError as exc:
        raise InvalidValue(str(exc), param="store") from exc
    if as_json:
        print_json(asdict(collected))
    else:
        _print(collected)


async def _collect(settings: Settings, grace_seconds: float, *, dry_run: bool) -> Collected:
    staging = Staging(settings.data_dir / "uploads")
    with open_current_database(settings) as database:
        garbage = Garbage(
            store=open_store(settings.store_url),
            staging=staging,
            control_plane=ControlPlane(database, *settings.load_secrets()),
            grace_seconds=grace_seconds,
            batch_days=settings.file_days,
        )
        try:
            return await garbage.collect(dry_run=dry_run)
        finally:
            await garbage.close()
            staging.close()


def _print(collected: Collected) -> None:
    for key in collected.removed_objects:
        typer.echo(key)
    verb = "would remove" if collected.dry_run else "removed"
    note(
        f"{verb} {len(collected.removed_objects)} of {collected.num_objects} objects "
        f"({collected.removed_bytes} bytes), {len(collected.expired_files)} expired files, "
        f"{collected.expired_responses} expired responses, "
        f"{len(collected.abandoned_uploads)} uploads and the files of "
        f"{len(collected.removed_files)}"
    )
