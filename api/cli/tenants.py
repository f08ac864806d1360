"""`loraplex tenants`: manages tenants, for operators."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from ..client.api_client import ApiClient
from .client import api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite, parse_finite
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

POLL_SECONDS = 1.0
"""Between two looks at a running deletion."""
COLUMNS = ["slug", "name", "weight", "slo", "id", "created_at", "suspended_at"]
TARGETS = {"ttft": "ttft_ms", "itl": "itl_ms"}
"""The API's names of the targets."""

Slug = Annotated[str, typer.Argument(help="The tenant's short name: a-z, 0-9 and '-'.")]
DisplayName = Annotated[str | None, typer.Option(help="Display name.")]
Weight = Annotated[
    float | None,
    typer.Option(callback=check_finite, help="Share of the device relative to other tenants."),
]

Slo = Annotated[
    str | None,
    typer.Option(
        metavar="TARGETS",
        help="Targets in milliseconds, such as ttft=2000,itl=80. One that is left out is the "
        "server's; an empty text removes both.",
    ),
]


@app.command("create")
def create(
    slug: Slug,
    name: DisplayName = None,
    weight: Weight = None,
    slo: Slo = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant."""
    body: dict[str, Any] = {"slug": slug, "name": name, "weight": 1.0 if weight is None else weight}
    if slo:
        body["slo"] = _parse_slo(slo)
    with open_client() as client:
        tenant = client.admin.post("/tenants", body)
    _print([tenant], tenant, as_json=as_json)
    note(f"Created tenant {slug}. Next: loraplex keys create --tenant {slug}")


@app.command("list")
def list_(
    suspended: Annotated[
        bool | None, typer.Option("--suspended/--active", help="Only these.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tenants."""
    with open_client() as client:
        tenants = list(client.admin.pages("/tenants", suspended=suspended))
    _print(tenants, tenants, as_json=as_json)


@app.command("show")
def show(slug: Slug, as_json: AsJson = False) -> None:
    """Show a tenant."""
    with open_client() as client:
        tenant = client.admin.get(api_path("tenants", slug))
    _print([tenant], tenant, as_json=as_json)


@app.command("set")
def set_(
    slug: Slug,
    name: DisplayName = None,
    weight: Weight = None,
    slo: Slo = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant's name, weight or targets; an empty name removes it."""
    changes: dict[str, Any] = {} if weight is None else {"weight": weight}
    if name is not None:
        changes["name"] = name or None
    if slo is not None:
        changes["slo"] = _parse_slo(slo)
    if not changes:
        raise CommandFailed("Nothing to set: pass --name, --weight or --slo.", ExitCode.USAGE)
    _change(slug, changes, as_json=as_json)


@app.command("suspend")
def suspend(slug: Slug, as_json: AsJson = False) -> None:
    """Suspend a tenant: its keys are refused, its adapters are kept."""
    _change(slug, {"suspended": True}, as_json=as_json)


@app.command("resume")
def resume(slug: Slug, as_json: AsJson = False) -> None:
    """Resume a suspended tenant."""
    _change(slug, {"suspended": False}, as_json=as_json)


@app.command("delete")
def delete(
    slug: Slug,
    confirm: Annotated[
        str | None, typer.Option(metavar="SLUG", help="The tenant's slug again: do not ask for it.")
    ] = None,
    with_usage: Annotated[
        bool, typer.Option("--with-usage", help="Delete its usage records too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a tenant and everything that it has, and wait for the receipt.

    Usage records stay, without keys and users, unless --with-usage is given.
    """
    with open_client() as client:
        given = confirm or _ask_for_slug(client, slug)
        query = {"confirm": given, "with_usage": str(with_usage).lower()}
        deletion = client.admin.delete(api_path("tenants", slug), **query)
        deletion = _await_deletion(client, deletion)
    if as_json:
        print_json(deletion)
        return
    typer.echo(f"deleted {slug}  {deletion['id']}  at {deletion['finished_at']}")
    print_rows(
        [{"table": table, "rows": rows} for table, rows in sorted(deletion["rows"].items())],
        ["table", "rows"],
    )


def _ask_for_slug(client: ApiClient, slug: str) -> str:
    """Ask the person at the terminal. Raises CommandFailed unless the answer is the slug."""
    client.admin.get(api_path("tenants", slug))
    if not sys.stdin.isatty():
        raise CommandFailed(f"Not confirmed: add --confirm {slug}.", ExitCode.USAGE)
    question = f"This permanently deletes {slug} and everything that it has. Type its slug"
    if typer.prompt(question, err=True) != slug:
        raise CommandFailed("Nothing was deleted.", ExitCode.FAILED)
    return slug


def _await_deletion(client: ApiClient, deletion: dict[str, Any]) -> dict[str, Any]:
    path = api_path("tenant-deletions", deletion["id"])
    try:
        while deletion["finished_at"] is None:
            time.sleep(POLL_SECONDS)
            deletion = client.admin.get(path)
    except KeyboardInterrupt:
        raise CommandFailed(
            f"Interrupted. The deletion continues; its receipt is kept under /admin{path}.",
            ExitCode.INTERRUPTED,
        ) from None
    return deletion


def _change(slug: str, changes: dict[str, Any], *, as_json: bool) -> None:
    with open_client() as client:
        tenant = client.admin.patch(api_path("tenants", slug), changes)
    _print([tenant], tenant, as_json=as_json)


def _parse_slo(text: str) -> dict[str, float] | None:
    """The body of the targets; None of an empty text. Raises CommandFailed."""
    targets: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            targets[TARGETS[name.strip()]] = parse_finite(value)
        except (KeyError, ValueError):
            message = f"--slo: {part!r} is not ttft=MILLISECONDS or itl=MILLISECONDS."
            raise CommandFailed(message, ExitCode.USAGE) from None
    return targets or None


def _format_slo(slo: dict[str, Any]) -> str:
    return ",".join(
        f"{name}={slo[field]:g}" for name, field in TARGETS.items() if slo[field] is not None
    )


def _print(rows: list[Any], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows([{**row, "slo": _format_slo(row["slo"])} for row in rows], COLUMNS)
