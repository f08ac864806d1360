"""`loraplex adapters gate`: what a version must pass before an alias moves."""

from __future__ import annotations

from typing import Annotated

import typer

from .client import api_path, open_client
from .numbers import check_finite
from .output import AsJson, print_json, print_rows
from .references import Alias, Name

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("set")
def set_gate(
    name: Name,
    alias: Alias,
    golden_set: Annotated[
        str, typer.Argument(metavar="SET", help="Name of the adapter's golden set.")
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            callback=check_finite,
            help="Loss of mean score that is allowed.",
            show_default="that of the set",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let an alias move only to versions that lose nothing on a golden set."""
    body = {"golden_set": golden_set, "tolerance": tolerance}
    with open_client() as client:
        gate = client.put(api_path("adapters", name, "aliases", alias, "gate"), body)
    if as_json:
        print_json(gate)
    else:
        typer.echo(f"{name}@{alias} has a gate with the golden set {golden_set}")


@app.command("show")
def show_gate(name: Name, alias: Alias, as_json: AsJson = False) -> None:
    """Show the gate of an alias."""
    with open_client() as client:
        gate = client.get(api_path("adapters", name, "aliases", alias, "gate"))
    if as_json:
        print_json(gate)
    else:
        print_rows([gate], ["golden_set", "tolerance", "created_by", "updated_at"])


@app.command("rm")
def remove_gate(name: Name, alias: Alias, as_json: AsJson = False) -> None:
    """Remove the gate of an alias, which moves freely from now on."""
    with open_client() as client:
        client.delete(api_path("adapters", name, "aliases", alias, "gate"))
    if as_json:
        print_json({"adapter": name, "alias": alias, "deleted": True})
    else:
        typer.echo(f"removed the gate of {name}@{alias}")
