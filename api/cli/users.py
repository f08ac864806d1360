"""`loraplex users`: manages a tenant's users and their roles."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...platform.keys.principal import TenantRole
from .client import ApiClient, api_path, open_client
from .connection import flag
from .exit_codes import CommandFailed, ExitCode
from .invitations import print_invitation
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["email", "role", "id", "created_at", "disabled_at"]

Who = Annotated[str, typer.Argument(metavar="USER", help="The user's address or id.")]
Role = Annotated[TenantRole, typer.Option(help="Role of the user.")]


@app.command("create")
def create(
    email: Annotated[str, typer.Argument(help="The user's address.")],
    role: Role = TenantRole.VIEWER,
    as_json: AsJson = False,
) -> None:
    """Add a user."""
    with open_client() as client:
        user = client.post("/users", {"email": email, "role": role})
    _print([user], user, as_json=as_json)
    invite = f"loraplex users invite {user['email']}"
    if tenant := flag("tenant"):
        invite += f" --tenant {tenant}"
    note(f"Created user {user['email']}. Next: {invite}")


@app.command("list")
def list_(
    role: Annotated[TenantRole | None, typer.Option(help="Only these.")] = None,
    disabled: Annotated[
        bool | None, typer.Option("--disabled/--active", help="Only these.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tenant's users."""
    with open_client() as client:
        users = list(client.pages("/users", role=role, disabled=disabled))
    _print(users, users, as_json=as_json)


@app.command("show")
def show(user: Who, as_json: AsJson = False) -> None:
    """Show a user."""
    with open_client() as client:
        found = client.get(api_path("users", find_user_id(client, user)))
    _print([found], found, as_json=as_json)


@app.command("invite")
def invite(user: Who, as_json: AsJson = False) -> None:
    """Print a one-time link, valid for a day, for the user to set a console password."""
    with open_client() as client:
        user_id = find_user_id(client, user)
        invitation = client.post(api_path("users", user_id, "invitation"))
    print_invitation(invitation, as_json=as_json)


@app.command("link")
def link(
    user: Who,
    subject: Annotated[
        str, typer.Argument(help="The person's subject (`sub`) at the identity provider.")
    ],
    as_json: AsJson = False,
) -> None:
    """Let a person of the identity provider sign in as the user."""
    with open_client() as client:
        path = api_path("users", find_user_id(client, user), "identity")
        identity = client.put(path, {"subject": subject})
    if as_json:
        print_json(identity)
    else:
        print_rows([identity], ["issuer", "subject", "created_at"])


@app.command("unlink")
def unlink(user: Who) -> None:
    """Take the identity away; this ends the user's sessions."""
    with open_client() as client:
        client.delete(api_path("users", find_user_id(client, user), "identity"))
    note(f"{user} cannot sign in through the identity provider any more.")


@app.command("set")
def set_(user: Who, role: Role, as_json: AsJson = False) -> None:
    """Change a user's role; the user's keys are limited to it immediately."""
    _change(user, {"role": role}, as_json=as_json)


@app.command("disable")
def disable(user: Who, as_json: AsJson = False) -> None:
    """Disable a user and revoke the user's keys permanently."""
    _change(user, {"disabled": True}, as_json=as_json)


@app.command("enable")
def enable(user: Who, as_json: AsJson = False) -> None:
    """Enable a disabled user, who needs a new key."""
    _change(user, {"disabled": False}, as_json=as_json)


def find_user_id(client: ApiClient, user: str) -> str:
    """The id of the user of this address or id. Raises CommandFailed."""
    if "@" not in user:
        return user
    found = client.get("/users", email=user)["data"]
    if not found:
        raise CommandFailed(f"User not found: {user}.", ExitCode.NOT_FOUND)
    user_id: str = found[0]["id"]
    return user_id


def _change(user: str, changes: dict[str, Any], *, as_json: bool) -> None:
    with open_client() as client:
        changed = client.patch(api_path("users", find_user_id(client, user)), changes)
    _print([changed], changed, as_json=as_json)


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows(rows, COLUMNS)
