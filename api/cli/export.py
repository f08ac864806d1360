"""`loraplex export`: copies a tenant's data into a folder or a tar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..client.api_client import ApiClient
from ..client.tenant_export import TenantExport, packed
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json
from .progress import TerminalProgress

STDOUT = Path("-")

app = typer.Typer(add_completion=False)


@app.command()
def export(
    folder: Annotated[Path | None, typer.Argument(help="Created if missing.")] = None,
    tar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a tar instead of a folder; `-` is stdout."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a tenant's data: adapters, users, keys without secrets, usage, audit log, request log,
    budgets, files, batches, fine-tuning jobs, golden sets, evaluations and stored responses.

    The key needs all scopes. After an interruption, the same command continues a folder; a tar is
    begun again.
    """
    if (folder is None) == (tar is None):
        raise CommandFailed("Pass either a folder or --tar FILE.", ExitCode.USAGE)
    if tar == STDOUT and as_json:
        raise CommandFailed("--json and a tar would both be written to stdout.", ExitCode.USAGE)
    with open_client() as client:
        if folder is not None:
            counts = _export(client, folder, is_quiet=as_json)
        else:
            with packed(None if tar == STDOUT else tar) as temporary:
                counts = _export(client, temporary, is_quiet=as_json)
    if as_json:
        print_json(counts)
    else:
        summary = ", ".join(f"{number} {name}" for name, number in counts.items())
        note(f"Exported to {folder or tar}: {summary}.")


def _export(client: ApiClient, folder: Path, *, is_quiet: bool) -> dict[str, int]:
    return dict(TenantExport(client, folder, TerminalProgress(is_quiet=is_quiet)).run())
