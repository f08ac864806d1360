"""`loraplex keys`: a tenant's API keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from ...platform.base import utc_now
from ...platform.database import Database
from ...platform.keyring import Keyring
from ...platform.keys.models import ApiKey
from ...platform.keys.principal import Scope
from ...platform.keys.service import ApiKeyService
from ...platform.secrets import API_KEY_PEPPER
from ...platform.tenants import service as tenants
from ..settings import Settings, load_settings
from .admin import DatabaseUrl, DataDir, moment, open_current_database
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

TenantSlug = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's slug.")]
Scopes = Annotated[
    list[Scope] | None,
    typer.Option("--scope", help="What the key may do; may be repeated.", show_default="all"),
]


@app.command("create")
def create(
    tenant: TenantSlug,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    scopes: Scopes = None,
    expires_in_days: Annotated[
        int | None, typer.Option(min=1, max=3650, show_default="never")
    ] = None,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Issue a key and print it: this once, and never again."""
    settings = load_settings(database=database, data_dir=data_dir)
    expires_at = None if expires_in_days is None else utc_now() + timedelta(days=expires_in_days)
    with open_current_database(settings) as opened:
        tenant_id = _tenant_id(opened, tenant)
        with opened.transaction(tenant_id) as session:
            issued = _key_service(settings).issue(
                session, name=name, scopes=scopes or list(Scope), expires_at=expires_at
            )
    if as_json:
        print_json({**_key_row(issued.key), "key": issued.text})
    else:
        typer.echo(issued.text)
    note("Keep this key now: only its hash is stored.")


@app.command("ls")
def list_(
    tenant: TenantSlug,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List a tenant's keys, revoked ones included."""
    settings = load_settings(database=database, data_dir=data_dir)
    with open_current_database(settings) as opened:
        tenant_id = _tenant_id(opened, tenant)
        with opened.transaction(tenant_id, read_only=True) as session:
            rows = [_key_row(key) for key in _key_service(settings).list_keys(session)]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, ["id", "name", "scopes", "expires_at", "revoked_at", "last_used_at"])


@app.command("revoke")
def revoke(
    tenant: TenantSlug,
    key_id: Annotated[str, typer.Argument(help="The key's id, the part after 'lpx_live_'.")],
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from now on."""
    settings = load_settings(database=database, data_dir=data_dir)
    with open_current_database(settings) as opened:
        tenant_id = _tenant_id(opened, tenant)
        with opened.transaction(tenant_id) as session:
            row = _key_row(_key_service(settings).revoke(session, key_id))
    if as_json:
        print_json(row)
    else:
        print_rows([row], ["id", "name", "revoked_at"])


def _tenant_id(database: Database, slug: str) -> str:
    with database.platform_transaction(read_only=True) as session:
        return tenants.get_tenant(session, slug).id


def _key_service(settings: Settings) -> ApiKeyService:
    return ApiKeyService(Keyring(settings.load_secrets(), API_KEY_PEPPER))


def _key_row(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "scopes": key.scopes,
        "created_at": moment(key.created_at),
        "expires_at": moment(key.expires_at),
        "revoked_at": moment(key.revoked_at),
        "last_used_at": moment(key.last_used_at),
    }
