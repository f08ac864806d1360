"""`loraplex top`: a live view of a server's requests, queues and memory."""

from __future__ import annotations

from time import sleep
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from .client import ApiClient, open_client
from .output import print_json

app = typer.Typer(add_completion=False)

MIB = 1 << 20
LIVE_COLUMNS = ("tenant", "model", "state", "waits_for", "generated_tokens", "age_ms")
RANK_COLUMNS = (
    *("rank", "stage", "host", "resident_bytes", "weight_bytes", "kv_bytes"),
    *("arena_used_bytes", "arena_bytes", "host_used_bytes", "host_bytes", "age_seconds"),
)
RESIDENT_COLUMNS = ("tenant", "versions", "tier", "device_bytes", "num_leases")


@app.command()
def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes.")] = 1.0,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Rows of each table.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print JSON.")] = False,
) -> None:
    """Watch a server until ^C. A tenant sees its own requests, an operator sees all."""
    with open_client() as client:
        is_operator = client.get("/me")["tenant"] is None
        if as_json:
            print_json(_look(client, limit, is_operator=is_operator))
            return
        with Live(console=Console(), screen=True, auto_refresh=False) as screen:
            while True:
                shown = _draw(_look(client, limit, is_operator=is_operator), limit)
                screen.update(shown, refresh=True)
                sleep(interval)


def _look(client: ApiClient, limit: int, *, is_operator: bool) -> dict[str, Any]:
    if not is_operator:
        return {"requests": client.get("/requests/live", limit=limit), "residency": None}
    return {
        "requests": client.admin.get("/requests/live", limit=limit),
        "residency": client.admin.get("/residency"),
    }


def _draw(seen: dict[str, Any], limit: int) -> Group:
    requests, residency = seen["requests"], seen["residency"]
    tables = [_table("Requests", LIVE_COLUMNS, requests["data"])]
    if residency is not None:
        tables.append(_table("Adapters", RESIDENT_COLUMNS, residency["data"][:limit]))
        tables.append(
            _table(_totals(residency), ("tier", "num_bytes", "capacity_bytes"), residency["tiers"])
        )
        if residency["ranks"]:
            tables.append(_table("Ranks", RANK_COLUMNS, residency["ranks"]))
    return Group(*tables)


def _totals(residency: dict[str, Any]) -> str:
    return (
        f"{residency['num_running']} sequences running, {residency['num_waiting']} waiting; "
        f"device busy {residency['device_busy']:.0%}, "
        f"KV {residency['kv_usage']:.0%}, pinned {residency['pinned_bytes'] / MIB:.0f} MiB"
    )


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = Table(*columns, title=title, title_justify="left", expand=True)
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in columns))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / MIB:.1f} MiB"
    if isinstance(value, float):
        return str(round(value))
    text = ",".join(value) if isinstance(value, list) else str(value)
    # Names are other people's text: nothing in them may steer the terminal.
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))
