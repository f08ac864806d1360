"""`loraplex operators keys`: manages the API keys of operators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .client import api_path, open_client
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["id", "name", "created_at", "expires_at", "revoked_at", "last_used_at", "networks"]

Operator = Annotated[str, typer.Argument(metavar="OPERATOR", help="The operator's name.")]


@app.command("create")
def create(
    operator: Operator,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    expires_in_days: Annotated[int, typer.Option(min=1, max=3650)] = 90,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR", help="Restrict the key to this network; repeatable.", show_default="any"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It is shown only once."""
    body = {"name": name, "expires_in_days": expires_in_days, "networks": network or None}
    with open_client() as client:
        issued = client.admin.post(api_path("operators", operator, "keys"), body)
    if as_json:
        print_json(issued)
    else:
        typer.echo(issued["key"])
    note("Save this key now: only its hash is stored.")


@app.command("list")
def list_(operator: Operator, as_json: AsJson = False) -> None:
    """List an operator's keys, including revoked ones."""
    with open_client() as client:
        keys = client.admin.get(api_path("operators", operator, "keys"))["data"]
    _print(keys, keys, as_json=as_json)


@app.command("revoke")
def revoke(
    operator: Operator,
    key_id: Annotated[str, typer.Argument(help="The key's id, the part after 'lpx_admin_'.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key; it stops working everywhere within five seconds."""
    with open_client() as client:
        key = client.admin.delete(api_path("operators", operator, "keys", key_id))
    _print([key], key, as_json=as_json)


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows(rows, COLUMNS)
