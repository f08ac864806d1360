"""`loraplex budgets`: shows and sets what a tenant, its users and its keys may spend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ..client.api_client import ApiClient
from .client import api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["holder", "name", "id", "period", "amount", "spent", "reserved", "remaining", "currency"]

OfTenant = Annotated[
    str | None, typer.Option(metavar="SLUG", help="The tenant's budget (operators only).")
]
OfKey = Annotated[str | None, typer.Option(metavar="ID", help="The budget of this key.")]
OfUser = Annotated[str | None, typer.Option(metavar="ID", help="The budget of this user.")]
PeriodName = Annotated[str, typer.Option(help="day or month, in UTC.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show the budgets of a tenant, its users and its keys; operators pass --tenant."""
    with open_client() as client:
        budgets = client.get("/budgets")["data"]
    if as_json:
        print_json(budgets)
    else:
        print_rows(budgets, COLUMNS)


@app.command("set")
def set_(
    amount: Annotated[str, typer.Argument(help="Such as 250.00.")],
    of_tenant: OfTenant = None,
    of_key: OfKey = None,
    of_user: OfUser = None,
    period: PeriodName = "month",
    alert_percent: Annotated[
        list[int] | None,
        typer.Option(help="May be repeated.", show_default="50, 80 and 100"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set what may be spent in each day or month."""
    body: dict[str, Any] = {"amount": amount}
    if alert_percent is not None:
        body["alert_percents"] = alert_percent
    with _budget(of_tenant, of_key, of_user, period) as (client, path):
        budget = client.put(path, body)
    if as_json:
        print_json(budget)
    else:
        print_rows([budget], COLUMNS)


@app.command("remove")
def remove(
    of_tenant: OfTenant = None,
    of_key: OfKey = None,
    of_user: OfUser = None,
    period: PeriodName = "month",
) -> None:
    """Remove a budget."""
    with _budget(of_tenant, of_key, of_user, period) as (client, path):
        client.delete(path)
    typer.echo("Removed.")


@contextmanager
def _budget(
    tenant: str | None, key: str | None, user: str | None, period: str
) -> Iterator[tuple[ApiClient, str]]:
    """A client, and the path of the one budget that is named."""
    named = [
        (plural, name)
        for plural, name in (("tenants", tenant), ("keys", key), ("users", user))
        if name is not None
    ]
    if len(named) != 1:
        raise CommandFailed("Name one of --of-tenant, --of-key and --of-user.", ExitCode.USAGE)
    ((plural, name),) = named
    with open_client() as client:
        yield (
            (client.admin if tenant is not None else client),
            api_path(plural, name, "budgets", period),
        )
