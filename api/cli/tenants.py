"""`loraplex tenants`: who may use this installation."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...platform.tenants import service as tenants
from ...platform.tenants.models import Tenant
from ..settings import load_settings
from .admin import DatabaseUrl, DataDir, moment, open_current_database
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

Slug = Annotated[str, typer.Argument(help="The tenant's short name: a-z, 0-9 and '-'.")]


@app.command("create")
def create(
    slug: Slug,
    name: Annotated[str | None, typer.Option(help="A name for people.")] = None,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a tenant."""
    with (
        open_current_database(load_settings(database=database, data_dir=data_dir)) as opened,
        opened.platform_transaction() as session,
    ):
        tenant = tenants.create_tenant(session, slug, name=name)
    _print_tenant(tenant, as_json=as_json)
    note(f"Made the tenant {slug!r}. Next: loraplex keys create {slug}")


@app.command("ls")
def list_(database: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tenants."""
    with (
        open_current_database(load_settings(database=database, data_dir=data_dir)) as opened,
        opened.platform_transaction(read_only=True) as session,
    ):
        rows = [_tenant_row(tenant) for tenant in tenants.list_tenants(session)]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, ["slug", "name", "id", "created_at", "suspended_at"])


@app.command("suspend")
def suspend(
    slug: Slug, database: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Refuse a tenant's keys; its adapters stay."""
    with (
        open_current_database(load_settings(database=database, data_dir=data_dir)) as opened,
        opened.platform_transaction() as session,
    ):
        tenant = tenants.suspend_tenant(session, slug)
    _print_tenant(tenant, as_json=as_json)


@app.command("resume")
def resume(
    slug: Slug, database: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Accept a suspended tenant's keys again."""
    with (
        open_current_database(load_settings(database=database, data_dir=data_dir)) as opened,
        opened.platform_transaction() as session,
    ):
        tenant = tenants.resume_tenant(session, slug)
    _print_tenant(tenant, as_json=as_json)


def _print_tenant(tenant: Tenant, *, as_json: bool) -> None:
    row = _tenant_row(tenant)
    if as_json:
        print_json(row)
    else:
        print_rows([row], list(row))


def _tenant_row(tenant: Tenant) -> dict[str, Any]:
    return {
        "slug": tenant.slug,
        "name": tenant.name,
        "id": tenant.id,
        "created_at": moment(tenant.created_at),
        "suspended_at": moment(tenant.suspended_at),
    }
