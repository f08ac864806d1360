"""`loraplex prices`: sets and lists what tokens cost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from .client import open_client
from .output import AsJson, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = [
    *("base", "tenant", "currency", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("batch_discount", "effective_from"),
]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List prices in the order in which they were set (operators only)."""
    with open_client() as client:
        rows = list(client.admin.pages("/prices"))
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, COLUMNS)


@app.command("set")
def set_(
    currency: Annotated[str, typer.Option(help="Three capital letters, such as EUR.")],
    prompt_tokens: Annotated[str, typer.Option(metavar="PRICE", help="Of a million.")],
    completion_tokens: Annotated[str, typer.Option(metavar="PRICE", help="Of a million.")],
    cached_tokens: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help="Of a million; default: as other prompt tokens."),
    ] = None,
    batch_discount: Annotated[int, typer.Option(help="Percent.")] = 0,
    base: Annotated[
        str | None, typer.Option(help="The base's name; default: the one that is served.")
    ] = None,
    only_for: Annotated[
        str | None, typer.Option(metavar="SLUG", help="The only tenant that pays them.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%dT%H:%M:%SZ"], help="In UTC; default: in 30 seconds."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set the prices of a base model's tokens (operators only)."""
    body: dict[str, Any] = {
        "base": base,
        "tenant": only_for,
        "currency": currency,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": completion_tokens,
        "batch_discount": batch_discount,
        "effective_from": None if since is None else since.replace(tzinfo=UTC).isoformat(),
    }
    with open_client() as client:
        price = client.admin.post("/prices", body)
    if as_json:
        print_json(price)
    else:
        print_rows([price], COLUMNS)
