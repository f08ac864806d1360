"""`loraplex tenants`: manages tenants, for operators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .client import api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["slug", "name", "weight", "id", "created_at", "suspended_at"]

Slug = Annotated[str, typer.Argument(help="The tenant's short name: a-z, 0-9 and '-'.")]
DisplayName = Annotated[str | None, typer.Option(help="Display name.")]
Weight = Annotated[
    float | None,
    typer.Option(callback=check_finite, help="Share of the device relative to other tenants."),
]


@app.command("create")
def create(
    slug: Slug, name: DisplayName = None, weight: Weight = None, as_json: AsJson = False
) -> None:
    """Create a tenant."""
    body = {"slug": slug, "name": name, "weight": 1.0 if weight is None else weight}
    with open_client() as client:
        tenant = client.admin.post("/tenants", body)
    _print([tenant], tenant, as_json=as_json)
    note(f"Created tenant {slug}. Next: loraplex keys create --tenant {slug}")


@app.command("list")
def list_(
    suspended: Annotated[
        bool | None, typer.Option("--suspended/--active", help="Only these.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tenants."""
    with open_client() as client:
        tenants = list(client.admin.pages("/tenants", suspended=suspended))
    _print(tenants, tenants, as_json=as_json)


@app.command("show")
def show(slug: Slug, as_json: AsJson = False) -> None:
    """Show a tenant."""
    with open_client() as client:
        tenant = client.admin.get(api_path("tenants", slug))
    _print([tenant], tenant, as_json=as_json)


@app.command("set")
def set_(
    slug: Slug, name: DisplayName = None, weight: Weight = None, as_json: AsJson = False
) -> None:
    """Change a tenant's name or weight; an empty name removes it."""
    changes: dict[str, Any] = {} if weight is None else {"weight": weight}
    if name is not None:
        changes["name"] = name or None
    if not changes:
        raise CommandFailed("Nothing to set: pass --name or --weight.", ExitCode.USAGE)
    _change(slug, changes, as_json=as_json)


@app.command("suspend")
def suspend(slug: Slug, as_json: AsJson = False) -> None:
    """Suspend a tenant: its keys are refused, its adapters are kept."""
    _change(slug, {"suspended": True}, as_json=as_json)


@app.command("resume")
def resume(slug: Slug, as_json: AsJson = False) -> None:
    """Resume a suspended tenant."""
    _change(slug, {"suspended": False}, as_json=as_json)


def _change(slug: str, changes: dict[str, Any], *, as_json: bool) -> None:
    with open_client() as client:
        tenant = client.admin.patch(api_path("tenants", slug), changes)
    _print([tenant], tenant, as_json=as_json)


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows(rows, COLUMNS)
