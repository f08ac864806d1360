"""`loraplex webhooks`: sends a tenant's events to its own servers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...platform.webhooks.event_types import DeliveryState, EventType
from .client import api_path, open_client
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = ["id", "url", "events", "created_at", "failing_since", "disabled_at", "disabled_by"]
DELIVERY_COLUMNS = [
    *("event", "type", "state", "attempts", "created_at", "next_attempt_at", "ended_at"),
    *("last_status", "last_failure"),
]

WebhookId = Annotated[str, typer.Argument(help="The webhook's id, such as whk_1234.")]
Url = Annotated[str, typer.Argument(help="https://name[:port][/path][?query].")]
Events = Annotated[
    list[EventType] | None,
    typer.Option("--event", help="Type of events to send; repeatable.", show_default="all"),
]


@app.command("create")
def create(
    url: Url,
    event: Events = None,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook and print its secret. It is shown only once."""
    body = {"url": url, "events": event or None, "description": description}
    with open_client() as client:
        issued = client.post("/webhooks", body)
    _print_secret(issued, as_json=as_json)
    note(f"Webhook {issued['id']} was created.")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the tenant's webhooks."""
    with open_client() as client:
        webhooks = list(client.pages("/webhooks"))
    _print(webhooks, webhooks, as_json=as_json)


@app.command("show")
def show(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Show a webhook, without its secret."""
    with open_client() as client:
        webhook = client.get(api_path("webhooks", webhook_id))
    _print([webhook], webhook, as_json=as_json)


@app.command("update")
def update(
    webhook_id: WebhookId,
    url: Annotated[str | None, typer.Option(help="New URL.", show_default="unchanged")] = None,
    event: Annotated[
        list[EventType] | None,
        typer.Option(help="Type of events to send; repeatable.", show_default="unchanged"),
    ] = None,
    all_events: Annotated[bool, typer.Option("--all-events", help="Send all events.")] = False,
    description: Annotated[
        str | None, typer.Option(help="What it is for.", show_default="unchanged")
    ] = None,
    disabled: Annotated[
        bool | None,
        typer.Option("--disable/--enable", help="Stop or resume.", show_default="unchanged"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change a webhook. Enabling it also ends a row of failures."""
    given: dict[str, Any] = {"url": url, "events": event, "description": description}
    body = {name: value for name, value in given.items() if value}
    if all_events:
        body["events"] = None
    if disabled is not None:
        body["disabled"] = disabled
    with open_client() as client:
        webhook = client.patch(api_path("webhooks", webhook_id), body)
    _print([webhook], webhook, as_json=as_json)


@app.command("rm")
def remove(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Delete a webhook, its secrets and all its events."""
    with open_client() as client:
        client.delete(api_path("webhooks", webhook_id))
    if as_json:
        print_json({"id": webhook_id, "deleted": True})
    else:
        typer.echo(f"removed {webhook_id}")


@app.command("rotate")
def rotate(
    webhook_id: WebhookId,
    overlap_seconds: Annotated[
        int,
        typer.Option(min=0, max=30 * 24 * 3600, help="Time for which the old secret also signs."),
    ] = 24 * 3600,
    as_json: AsJson = False,
) -> None:
    """Give a webhook a new secret and print it once."""
    with open_client() as client:
        issued = client.post(
            api_path("webhooks", webhook_id, "rotate"), {"overlap_seconds": overlap_seconds}
        )
    _print_secret(issued, as_json=as_json)


@app.command("test")
def send_test(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Send a test event to a webhook; `deliveries` shows what came of it."""
    with open_client() as client:
        delivery = client.post(api_path("webhooks", webhook_id, "test"))
    if as_json:
        print_json(delivery)
    else:
        typer.echo(delivery["event"])


@app.command("deliveries")
def deliveries(
    webhook_id: WebhookId,
    state: Annotated[
        DeliveryState | None, typer.Option(help="Only in this state.", show_default="any")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List a webhook's events of the last 30 days, newest first."""
    with open_client() as client:
        path = api_path("webhooks", webhook_id, "deliveries")
        found = client.get(path, state=state, limit=limit)["data"]
    if as_json:
        print_json(found)
    else:
        print_rows(found, DELIVERY_COLUMNS)


def _print_secret(issued: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(issued)
    else:
        typer.echo(issued["secret"])
    note("Save this secret now: it is not shown again.")


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows([{**row, "events": row["events"] or "all"} for row in rows], COLUMNS)
