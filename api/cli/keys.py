"""`loraplex keys`: manages a tenant's API keys."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...platform.keys.principal import SCOPES_OF_ADAPTERS, Scope, TenantRole
from .client import api_path, open_client
from .output import AsJson, note, print_json, print_rows
from .users import find_user_id

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["id", "name", "scopes", "adapters", "user", "expires_at", "revoked_at", "last_used_at"]
DEFAULT_SCOPES = sorted(TenantRole.DEVELOPER.scopes)

KeyId = Annotated[str, typer.Argument(help="The key's id, the part after 'lpx_live_'.")]


@app.command("create")
def create(
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="Scope of the key; repeatable.", show_default=", ".join(DEFAULT_SCOPES)),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Restrict the key to this adapter; repeatable.",
            show_default="all, and the base model",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR", help="Restrict the key to this network; repeatable.", show_default="any"
        ),
    ] = None,
    expires_in_days: Annotated[
        int | None, typer.Option(min=1, max=3650, show_default="never")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Owner: email address or id.", show_default="a machine's")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It is shown only once."""
    body: dict[str, Any] = {
        "name": name,
        "scopes": scope or _default_scopes(is_restricted=bool(adapter)),
        "adapters": adapter or None,
        "networks": network or None,
        "expires_in_days": expires_in_days,
    }
    with open_client() as client:
        body["user"] = None if user is None else find_user_id(client, user)
        _print_issued(client.post("/keys", body), as_json=as_json)


@app.command("list")
def list_(
    active: Annotated[
        bool, typer.Option("--active", help="Exclude revoked and expired keys.")
    ] = False,
    user: Annotated[str | None, typer.Option(help="Only this user's keys (address or id).")] = None,
    as_json: AsJson = False,
) -> None:
    """List the tenant's keys, including revoked ones."""
    with open_client() as client:
        user_id = None if user is None else find_user_id(client, user)
        keys = list(client.pages("/keys", active=active, user=user_id))
    _print(keys, keys, as_json=as_json)


@app.command("show")
def show(key_id: KeyId, as_json: AsJson = False) -> None:
    """Show a key's details, without its secret."""
    with open_client() as client:
        key = client.get(api_path("keys", key_id))
    _print([key], key, as_json=as_json)


@app.command("rotate")
def rotate(
    key_id: KeyId,
    overlap_seconds: Annotated[
        int, typer.Option(min=0, max=30 * 24 * 3600, help="Time for which the old key stays valid.")
    ] = 24 * 3600,
    as_json: AsJson = False,
) -> None:
    """Create a key's successor and print it once. The old key expires after the overlap."""
    with open_client() as client:
        issued = client.post(
            api_path("keys", key_id, "rotate"), {"overlap_seconds": overlap_seconds}
        )
    _print_issued(issued, as_json=as_json)
    note(f"Key {key_id} expires in {overlap_seconds} s.")


@app.command("revoke")
def revoke(key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key; it stops working everywhere within five seconds."""
    with open_client() as client:
        key = client.delete(api_path("keys", key_id))
    _print([key], key, as_json=as_json)


def _default_scopes(*, is_restricted: bool) -> list[Scope]:
    return [scope for scope in DEFAULT_SCOPES if not is_restricted or scope in SCOPES_OF_ADAPTERS]


def _print_issued(issued: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(issued)
    else:
        typer.echo(issued["key"])
    note("Save this key now: only its hash is stored.")


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows(rows, COLUMNS)
