"""`loraplex export`: copies a tenant's data into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..client.tenant_export import TenantExport
from .client import open_client
from .output import AsJson, note, print_json
from .progress import TerminalProgress

app = typer.Typer(add_completion=False)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Created if missing.")],
    as_json: AsJson = False,
) -> None:
    """Export a tenant's data into a folder: adapters, users, keys without secrets, usage, audit
    log, request log, budgets, files, batches and fine-tuning jobs.

    The key needs all scopes. After an interruption, the same command continues.
    """
    with open_client() as client:
        counts = TenantExport(client, folder, TerminalProgress(is_quiet=as_json)).run()
    if as_json:
        print_json(counts)
    else:
        note(f"Exported to {folder}: {', '.join(f'{n} {name}' for name, n in counts.items())}.")
