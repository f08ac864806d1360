"""`loraplex prices`: sets, ends and lists what tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from .client import open_client
from .output import AsJson, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = [
    *("base", "tenant", "currency", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("trained_tokens", "batch_discount", "effective_from", "effective_until"),
]

BaseName = Annotated[
    str | None, typer.Option(help="The base's name; default: the one that is served.")
]
Moment = Annotated[
    datetime | None,
    typer.Option(formats=["%Y-%m-%dT%H:%M:%SZ"], help="In UTC; default: in 30 seconds."),
]


@app.command("list")
def list_(
    base: Annotated[str | None, typer.Option(help="Only of this base.")] = None,
    only_for: Annotated[
        str | None, typer.Option(metavar="SLUG", help="Only this tenant's own prices.")
    ] = None,
    current: Annotated[
        bool, typer.Option("--current", help="Only prices that are in effect now or will be.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List prices in the order in which they were set (operators only)."""
    wanted = {"base": base, "tenant": only_for, "current": current or None}
    with open_client() as client:
        rows = list(client.admin.pages("/prices", **wanted))
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
    trained_tokens: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help="Of a million, of fine-tuning jobs; default: free."),
    ] = None,
    batch_discount: Annotated[int, typer.Option(help="Percent.")] = 0,
    base: BaseName = None,
    only_for: Annotated[
        str | None, typer.Option(metavar="SLUG", help="The only tenant that pays them.")
    ] = None,
    since: Moment = None,
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
        "trained_tokens": trained_tokens,
        "batch_discount": batch_discount,
        "effective_from": _in_utc(since),
    }
    with open_client() as client:
        _print(client.admin.post("/prices", body), as_json)


@app.command()
def end(
    only_for: Annotated[str, typer.Option(metavar="SLUG", help="The tenant whose own prices end.")],
    base: BaseName = None,
    since: Moment = None,
    as_json: AsJson = False,
) -> None:
    """End a tenant's own prices: it pays those of all tenants from then on (operators only)."""
    body = {"tenant": only_for, "base": base, "effective_from": _in_utc(since)}
    with open_client() as client:
        _print(client.admin.post("/prices/end", body), as_json)


def _in_utc(moment: datetime | None) -> str | None:
    return None if moment is None else moment.replace(tzinfo=UTC).isoformat()


def _print(price: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(price)
    else:
        print_rows([price], COLUMNS)
