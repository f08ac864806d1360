"""`loraplex audit`: lists, exports and verifies the audit log."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ...platform.audit.checkpoint import Checkpoint
from ...platform.audit.service import PLATFORM_CHAIN, AuditLog
from ...platform.audit.verification import Verified
from ...platform.database import Database
from ...platform.keyring import Keyring
from ...platform.secrets import AUDIT_CHAIN_KEY
from ...platform.tenants import service as tenants
from ..settings import Settings
from .admin import open_current_database
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json, print_rows
from .setting_options import DatabaseUrl, DataDir
from .setting_sources import ConfigFile, settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False)

PAGE = 500
MAX_SHOWN = 10_000

OfPlatform = Annotated[
    bool,
    typer.Option("--platform", help="The platform's log: tenants, operators, operator keys."),
]
Action = Annotated[
    str | None, typer.Option(help="An action (key.revoke), or a noun (key) for all of its actions.")
]
ActorText = Annotated[str | None, typer.Option("--actor", help="An id, a name, or kind:id.")]
Resource = Annotated[str | None, typer.Option(help="By its name.")]
Since = Annotated[datetime | None, typer.Option(help="From this time, in UTC.")]
Until = Annotated[datetime | None, typer.Option(help="Before this time, in UTC.")]


@app.command("list")
def list_(
    is_platform: OfPlatform = False,
    action: Action = None,
    actor: ActorText = None,
    resource: Resource = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="Maximum number of rows.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show the latest changes, newest first."""
    query = _query(action, actor, resource, since, until) | {"limit": min(limit, PAGE)}
    entries: list[Any] = []
    with open_client() as client:
        for entry in (client.admin if is_platform else client).pages("/audit", **query):
            entries.append(entry)
            if len(entries) == limit:
                break
    if as_json:
        print_json(entries)
    else:
        rows = [{**entry, "actor": entry["actor"]["name"]} for entry in entries]
        print_rows(rows, ["number", "at", "actor", "action", "resource", "request_id"])


@app.command("export")
def export(
    is_platform: OfPlatform = False,
    action: Action = None,
    actor: ActorText = None,
    resource: Resource = None,
    since: Since = None,
    until: Until = None,
) -> None:
    """Print changes as JSON lines, oldest first."""
    query = _query(action, actor, resource, since, until) | {"limit": PAGE, "oldest_first": "true"}
    with open_client() as client:
        for entry in (client.admin if is_platform else client).pages("/audit", **query):
            typer.echo(json.dumps(entry, ensure_ascii=False, separators=(",", ":")))


@app.command("verify")
def verify(
    context: typer.Context,
    tenant: Annotated[
        str | None, typer.Option(help="Only the log of this tenant.", show_default="all logs")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A file that records the end of each log. Keep it outside the database: it "
            "detects a truncated log.",
        ),
    ] = None,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Verify the audit logs with the server's secret; fails if an entry was changed."""
    settings = settings_of(context, database=database, data_dir=data_dir)
    with open_current_database(settings) as opened:
        found = _verify(opened, settings, tenant, Checkpoint(checkpoint) if checkpoint else None)
    rows = [_row(name, verified) for name, verified in found.items()]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, ["log", "entries", "broken_at", "reason"])
    broken = [row["log"] for row in rows if row["broken_at"] is not None]
    if broken:
        raise CommandFailed(
            f"Changed since they were written: {', '.join(broken)}.", ExitCode.FAILED
        )
    note("All entries are unchanged.")


def _verify(
    database: Database, settings: Settings, tenant: str | None, checkpoint: Checkpoint | None
) -> dict[str, Verified]:
    """The result for each log, by name."""
    log = AuditLog(Keyring(settings.load_secrets(), AUDIT_CHAIN_KEY))
    found: dict[str, Verified] = {}
    with database.platform_transaction(read_only=True) as session:
        if tenant is None:
            chains = {each.slug: each.id for each in tenants.list_tenants(session)}
            chains[PLATFORM_CHAIN] = PLATFORM_CHAIN
        else:
            chains = {tenant: tenants.get_tenant(session, tenant).id}
        for name, chain in chains.items():
            verified = log.verify(session, chain)
            if checkpoint is not None:
                verified = checkpoint.check(session, verified)
            found[name] = verified
    if checkpoint is not None and all(verified.breach is None for verified in found.values()):
        checkpoint.save()
    return found


def _row(name: str, verified: Verified) -> dict[str, Any]:
    breach = verified.breach
    return {
        "log": name,
        "entries": verified.last_number,
        "broken_at": None if breach is None else breach.number,
        "reason": None if breach is None else breach.reason,
    }


def _query(
    action: str | None,
    actor: str | None,
    resource: str | None,
    since: datetime | None,
    until: datetime | None,
) -> dict[str, str | int]:
    wanted: dict[str, str | None] = {
        "action": action,
        "actor": actor,
        "resource": resource,
        "since": None if since is None else f"{since.isoformat()}Z",
        "until": None if until is None else f"{until.isoformat()}Z",
    }
    return {name: value for name, value in wanted.items() if value is not None}
