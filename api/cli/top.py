"""`loraplex top`: a live view of a server's requests, queues and memory."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from .client import ApiClient, open_client
from .fleet import figures_of
from .output import print_json

app = typer.Typer(add_completion=False)

MIB = 1 << 20
LIVE_COLUMNS = ("tenant", "model", "state", "waits_for", "generated_tokens", "age_ms")
OBJECTIVES_SECONDS = 15.0
OBJECTIVE_COLUMNS = ("set_by", "attained_share", "met", "ttft", "itl", "refused", "failed")
RANK_COLUMNS = (
    *("rank", "stage", "host", "resident_bytes", "weight_bytes", "kv_bytes"),
    *("arena_used_bytes", "arena_bytes", "host_used_bytes", "host_bytes", "age_seconds"),
)
PREFIX_COLUMNS = (
    *("tier", "used_bytes", "capacity_bytes", "hit_tokens", "copied_in_bytes"),
    *("copied_out_bytes", "evicted_blocks"),
)
REPLICA_COLUMNS = (
    *("address", "role", "state", "running", "waiting", "resident", "loading", "kv"),
    "handovers",
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
        watch = _Watch(client, limit)
        if as_json:
            print_json(watch.look())
            return
        with Live(console=Console(), screen=True, auto_refresh=False) as screen:
            while True:
                screen.update(draw(watch.look(), limit), refresh=True)
                sleep(interval)


class _Watch:
    """Asks the server again and again; for the figures of objectives, which it writes into its
    database first, less often."""

    def __init__(self, client: ApiClient, limit: int) -> None:
        self._is_operator = client.get("/me")["tenant"] is None
        self._client = client
        self._asked = client.admin if self._is_operator else client
        self._limit = limit
        self._objectives: list[dict[str, Any]] = []
        self._goodput: float | None = None
        self._due = 0.0

    def look(self) -> dict[str, Any]:
        """What is shown once. Raises as the client does."""
        if monotonic() >= self._due:
            overview = self._asked.get("/overview", range="15m")
            self._objectives = overview["objectives"]
            self._goodput = overview["series"]["goodput_per_second"][-2]  # the last whole step's
            self._due = monotonic() + OBJECTIVES_SECONDS
        return {
            "requests": self._asked.get("/requests/live", limit=self._limit),
            "objectives": self._objectives,
            "goodput_per_second": self._goodput,
            "residency": self._client.admin.get("/residency") if self._is_operator else None,
        }


def draw(seen: dict[str, Any], limit: int) -> Group:
    """The screen: one table for each kind of thing, with `limit` rows at most."""
    requests, residency = seen["requests"], seen["residency"]
    tables = [_table("Requests", LIVE_COLUMNS, requests["data"])]
    if seen["objectives"]:
        title = f"Objectives of 15 min; goodput {seen['goodput_per_second'] or 0:.2f} per second"
        tables.append(_table(title, OBJECTIVE_COLUMNS, seen["objectives"]))
    if residency is not None:
        tables.append(_table("Adapters", RESIDENT_COLUMNS, residency["data"][:limit]))
        tables.append(
            _table(_totals(residency), ("tier", "num_bytes", "capacity_bytes"), residency["tiers"])
        )
        tables.append(_table(_border(residency["border"]), PREFIX_COLUMNS, residency["prefixes"]))
        if residency["replicas"]:
            replicas = [_replica_row(replica) for replica in residency["replicas"]]
            tables.append(_table("Replicas", REPLICA_COLUMNS, replicas))
        if residency["ranks"]:
            tables.append(_table("Ranks", RANK_COLUMNS, residency["ranks"]))
    return Group(*tables)


def _totals(residency: dict[str, Any]) -> str:
    return (
        f"{residency['num_running']} sequences running, {residency['num_waiting']} waiting; "
        f"device busy {residency['device_busy']:.0%}, "
        f"KV {residency['kv_usage']:.0%}, pinned {residency['pinned_bytes'] / MIB:.0f} MiB"
    )


def _border(border: dict[str, Any]) -> str:
    return (
        f"Prefix cache; KV cache {border['kv_cache_bytes'] / MIB:.0f} MiB, "
        f"arena {border['arena_bytes'] / MIB:.0f} MiB, border moved {border['moves']} times"
    )


def _replica_row(replica: dict[str, Any]) -> dict[str, Any]:
    """The columns of a replica: its figures, or why the server is not connected to it."""
    seen = replica["connection"]
    failure = seen["failure"]
    state = failure["code"] if failure else seen["state"]
    return {"address": replica["address"], "state": state, **figures_of({} if failure else seen)}


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
    if name.endswith("_share"):
        return f"{value:.0%}"
    if isinstance(value, float):
        return str(round(value))
    text = ",".join(value) if isinstance(value, list) else str(value)
    # Names are other people's text: nothing in them may steer the terminal.
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))
