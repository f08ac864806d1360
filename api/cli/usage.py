"""`loraplex usage`: shows summed usage."""

from __future__ import annotations

import csv
import sys
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, print_json, print_rows

app = typer.Typer(add_completion=False)

SUMS = [
    *("requests", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("cold_loads", "residency_byte_seconds", "trained_tokens", "amount", "currency"),
]
RESOURCES = ["step_seconds", "kv_byte_seconds", "loaded_bytes", "fetched_bytes"]
COSTS = ["cost", "margin"]
"""What operators see besides."""


class By(StrEnum):
    """What sums are kept apart by."""

    TENANT = "tenant"
    DAY = "day"
    ADAPTER = "adapter"
    VERSION = "version"


@app.command()
def usage(
    since: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The first day, in UTC.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The day after the last.")
    ] = None,
    by: Annotated[
        list[By] | None, typer.Option(help="May be repeated.", show_default="day, adapter, version")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Only of this adapter.")] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="Of all tenants; operators only.")
    ] = False,
    resources: Annotated[
        bool,
        typer.Option(
            "--resources",
            help="A table of what requests have used of the engine, and for operators what that "
            "costs. CSV and JSON always have both.",
        ),
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show usage by day, adapter, version or tenant."""
    if as_csv and as_json:
        raise CommandFailed("--csv or --json, not both.", ExitCode.USAGE)
    groups = by or [By.DAY, By.ADAPTER, By.VERSION]
    if By.VERSION in groups and By.ADAPTER not in groups:
        groups = [*groups, By.ADAPTER]
    with open_client() as client:
        rows = list(
            (client.admin if all_tenants else client).pages(
                "/usage",
                since=_day(since),
                until=_day(until),
                group_by=[group.value for group in groups],
                adapter=adapter,
            )
        )
    costs = COSTS if all_tenants else []
    keys = [group.value for group in By if group in groups]
    if as_json:
        print_json(rows)
    elif as_csv:
        _print_csv(rows, [*keys, *SUMS, *RESOURCES, *costs])
    else:
        shown = ["requests", *RESOURCES, *costs] if resources else SUMS
        print_rows([_shown(row) for row in rows], [*keys, *shown])


def _day(moment: datetime | None) -> str | None:
    return None if moment is None else moment.date().isoformat()


def _print_csv(rows: list[dict[str, Any]], columns: list[str]) -> None:
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The base model has no adapter's name."""
    if row.get("adapter", "") is None:
        return {**row, "adapter": "(base)"}
    return row
