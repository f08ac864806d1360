"""`loraplex golden-sets`: the golden sets of adapters on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .client import api_path, open_client
from .numbers import check_finite
from .output import AsJson, print_json, print_rows
from .references import Name

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["name", "num_cases", "tolerance", "judge", "created_by", "updated_at"]

SetName = Annotated[str, typer.Argument(metavar="SET", help="Name of the golden set.")]


@app.callback()
def _of_sets() -> None:
    """Set, list and remove the golden sets of an adapter."""


@app.command("list")
def list_(name: Name, as_json: AsJson = False) -> None:
    """List the golden sets of an adapter."""
    with open_client() as client:
        found = client.get(api_path("adapters", name, "golden-sets"))["data"]
    if as_json:
        print_json(found)
    else:
        print_rows(found, COLUMNS)


@app.command("set")
def set_(
    name: Name,
    golden_set: SetName,
    file: Annotated[
        Path,
        typer.Argument(help="One case per line.", exists=True, dir_okay=False, readable=True),
    ],
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, max=1, callback=check_finite, help="Loss of mean score that is no regression."
        ),
    ] = 0.0,
    judge: Annotated[
        str | None, typer.Option(help="Model that judges cases with the scorer judge.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file of cases as a golden set, or replace the set."""
    with open_client() as client:
        uploaded = client.post_file("/files", file, purpose="evals")["id"]
        body = {"file": uploaded, "tolerance": tolerance, "judge": judge}
        row = client.put(api_path("adapters", name, "golden-sets", golden_set), body)
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{name} has the golden set {golden_set} with {row['num_cases']} cases")


@app.command("rm")
def remove(name: Name, golden_set: SetName, as_json: AsJson = False) -> None:
    """Remove a golden set; its file and evaluations stay."""
    with open_client() as client:
        client.delete(api_path("adapters", name, "golden-sets", golden_set))
    if as_json:
        print_json({"adapter": name, "golden_set": golden_set, "deleted": True})
    else:
        typer.echo(f"removed the golden set {golden_set} of {name}")
