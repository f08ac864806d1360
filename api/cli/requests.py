"""`loraplex requests`: shows finished requests with their phases, and running requests."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from .client import ApiClient, api_path, open_client
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

MAX_PAGE = 500
LOG_COLUMNS = ["created_at", "id", "status", "error_code", "model", "completion_tokens", "total_ms"]
LIVE_COLUMNS = [
    "request_id", "model", "state", "waits_for", "generated_tokens", "prompt_tokens", "age_ms",
]  # fmt: skip
PHASE_COLUMNS = ["phase", "ms", "summary"]

Everybodys = Annotated[bool, typer.Option("--all-tenants", help="Of all tenants; operators only.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")]


@app.command("list")
def list_(
    adapter: Annotated[str | None, typer.Option(help="Only requests of this adapter.")] = None,
    code: Annotated[str | None, typer.Option(help="Only requests with this error code.")] = None,
    status: Annotated[int | None, typer.Option(help="Only requests with this HTTP status.")] = None,
    since: Annotated[
        datetime | None, typer.Option(help="Only requests since this time, in UTC.")
    ] = None,
    limit: Limit = 50,
    all_tenants: Everybodys = False,
    as_json: AsJson = False,
) -> None:
    """List finished requests, newest first."""
    moment = None if since is None else since.replace(tzinfo=since.tzinfo or UTC).isoformat()
    with open_client() as client:
        entries = _api(client, all_tenants).pages(
            "/requests",
            adapter=adapter,
            code=code,
            status=status,
            since=moment,
            limit=min(limit, 500),
        )
        found = list(islice(entries, limit))
    _print_log(found, all_tenants=all_tenants, as_json=as_json)


@app.command("show")
def show(
    request_id: Annotated[str, typer.Argument(help="The `x-request-id` of the response.")],
    all_tenants: Everybodys = False,
    as_json: AsJson = False,
) -> None:
    """Show where a request's time went, or why it was refused."""
    with open_client() as client:
        explained = _api(client, all_tenants).get(api_path("requests", request_id))
    if as_json:
        print_json(explained)
        return
    typer.echo(explained["summary"])
    phases = [{**phase, "ms": round(phase["ms"], 1)} for phase in explained["phases"]]
    if phases:
        print_rows(phases, PHASE_COLUMNS)
    for name, value in explained["request"].items():
        if value is not None:
            typer.echo(f"{name}: {value}")


@app.command("live")
def live(limit: Limit = 100, all_tenants: Everybodys = False, as_json: AsJson = False) -> None:
    """List running and queued requests, oldest first."""
    with open_client() as client:
        found = _api(client, all_tenants).get("/requests/live", limit=min(limit, MAX_PAGE))
    if as_json:
        print_json(found)
        return
    columns = [*(["tenant"] if all_tenants else []), *LIVE_COLUMNS]
    print_rows([_rounded(entry) for entry in found["data"]], columns)
    note(f"{len(found['data'])} of {found['num_sequences']} sequences")


@app.command("cancel")
def cancel(
    request_id: Annotated[str, typer.Argument(help="Request id from `loraplex requests live`.")],
) -> None:
    """Abort a running request; its client receives `request_cancelled`."""
    with open_client() as client:
        client.delete(api_path("requests", request_id))
    note(f"Ended {request_id}.")


def _api(client: ApiClient, all_tenants: bool) -> ApiClient:
    return client.admin if all_tenants else client


def _print_log(entries: list[Any], *, all_tenants: bool, as_json: bool) -> None:
    if as_json:
        print_json(entries)
        return
    columns = [*(["tenant"] if all_tenants else []), *LOG_COLUMNS]
    print_rows([_rounded(entry) for entry in entries], columns)


def _rounded(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value) if isinstance(value, float) else value for name, value in entry.items()
    }
