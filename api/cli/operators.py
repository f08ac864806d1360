"""`loraplex operators`: manages operators. `create` adds the first one, on the server's machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from ...platform.accounts.service import AccountService, IssuedInvitation
from ...platform.audit.event import BY_SYSTEM, Event
from ...platform.audit.service import AuditLog
from ...platform.database import Database
from ...platform.keyring import Keyring
from ...platform.keys.principal import OperatorRole
from ...platform.operators.service import IssuedOperatorKey, OperatorService
from ...platform.secrets import API_KEY_PEPPER, AUDIT_CHAIN_KEY
from . import operator_keys
from .admin import moment, open_current_database, settings_beside_server
from .client import api_path, open_client
from .connection import find_url
from .invitations import join_url, print_invitation
from .output import AsJson, note, print_json, print_rows
from .setting_options import DatabaseUrl, DataDir
from .setting_sources import ConfigFile, settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(operator_keys.app, name="keys", help="Manage an operator's API keys.")

COLUMNS = ["name", "role", "id", "created_at", "disabled_at"]

Name = Annotated[str, typer.Argument(help="The operator's name: a-z, 0-9, '.', '_' and '-'.")]
Role = Annotated[OperatorRole, typer.Option(help="Role of the operator.")]
ExpiresInDays = Annotated[int, typer.Option(min=1, max=3650, help="Days until the key expires.")]


@app.command("create")
def create(
    context: typer.Context,
    name: Name,
    role: Role = OperatorRole.ADMIN,
    expires_in_days: ExpiresInDays = 90,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Create an operator directly in the database and print its key once. Use it for the first
    operator, or if every operator key is lost. It finds the data folder of a running server; with
    several servers, pass --data-dir. The printed one-time link lets the operator set a console
    password within a day."""
    settings = settings_beside_server(settings_of(context, database=database, data_dir=data_dir))
    with open_current_database(settings) as opened:
        issued, invitation = _create(
            opened, settings.load_secrets(), name, role, timedelta(days=expires_in_days)
        )
    url = join_url(find_url(), invitation.token)
    if as_json:
        shown = {"name": name, "role": role, "key": issued.text, "console": url}
        print_json({**shown, "expires_at": moment(issued.key.expires_at)})
    else:
        typer.echo(issued.text)
        note(f"Set a password for the console within a day: {url}")
    note("Save this key now: only its hash is stored. `loraplex login` saves it for commands.")


@app.command("add")
def add(name: Name, role: Role = OperatorRole.VIEWER, as_json: AsJson = False) -> None:
    """Add an operator without a key."""
    with open_client() as client:
        operator = client.admin.post("/operators", {"name": name, "role": role})
    _print([operator], operator, as_json=as_json)
    note(f"Created operator {name}. Next: loraplex operators keys create {name}")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the operators."""
    with open_client() as client:
        operators = list(client.admin.pages("/operators"))
    _print(operators, operators, as_json=as_json)


@app.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show an operator."""
    with open_client() as client:
        operator = client.admin.get(api_path("operators", name))
    _print([operator], operator, as_json=as_json)


@app.command("invite")
def invite(name: Name, as_json: AsJson = False) -> None:
    """Print a one-time link, valid for a day, for the operator to set a console password."""
    with open_client() as client:
        invitation = client.admin.post(api_path("operators", name, "invitation"))
    print_invitation(invitation, as_json=as_json)


@app.command("link")
def link(
    name: Name,
    subject: Annotated[
        str, typer.Argument(help="The person's subject (`sub`) at the identity provider.")
    ],
    as_json: AsJson = False,
) -> None:
    """Let a person of the identity provider sign in as the operator."""
    with open_client() as client:
        path = api_path("operators", name, "identity")
        identity = client.admin.put(path, {"subject": subject})
    if as_json:
        print_json(identity)
    else:
        print_rows([identity], ["issuer", "subject", "created_at"])


@app.command("unlink")
def unlink(name: Name) -> None:
    """Take the identity away; this ends the operator's sessions."""
    with open_client() as client:
        client.admin.delete(api_path("operators", name, "identity"))
    note(f"{name} cannot sign in through the identity provider any more.")


@app.command("set")
def set_(name: Name, role: Role, as_json: AsJson = False) -> None:
    """Change an operator's role."""
    _change(name, {"role": role}, as_json=as_json)


@app.command("disable")
def disable(name: Name, as_json: AsJson = False) -> None:
    """Disable an operator and revoke the operator's keys permanently."""
    _change(name, {"disabled": True}, as_json=as_json)


@app.command("enable")
def enable(name: Name, as_json: AsJson = False) -> None:
    """Enable a disabled operator, who needs a new key."""
    _change(name, {"disabled": False}, as_json=as_json)


def _create(
    database: Database, secrets: list[bytes], name: str, role: OperatorRole, lifetime: timedelta
) -> tuple[IssuedOperatorKey, IssuedInvitation]:
    service = OperatorService(Keyring(secrets, API_KEY_PEPPER))
    audit_log = AuditLog(Keyring(secrets, AUDIT_CHAIN_KEY))
    with database.platform_transaction() as session:
        operator = service.create(session, name, role)
        issued = service.issue_key(session, operator, name="default", lifetime=lifetime)
        invitation = AccountService().invite_operator(session, operator)
        details = {"role": role, "key": issued.key.id}
        audit_log.record_platform(session, BY_SYSTEM, Event("operator.create", name, details))
    return issued, invitation


def _change(name: str, changes: dict[str, Any], *, as_json: bool) -> None:
    with open_client() as client:
        operator = client.admin.patch(api_path("operators", name), changes)
    _print([operator], operator, as_json=as_json)


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows(rows, COLUMNS)
