"""`loraplex rebase`: moves every tenant's adapters to another base model.

An adapter version belongs to the base for which it was pushed. Therefore the versions in use are
pushed again to a server of the new base, which shares the old server's database and store. There
they are examined and attested as new versions. Aliases are switched once the report is
satisfactory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..client.connection import Connection
from ..client.downloads import download_adapter
from ..client.errors import ClientError
from ..client.local_adapter import read_adapter
from ..client.uploads import push_adapter, wait_until_settled
from .client import ApiClient, api_path, open_client
from .connection import find_connection
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json, print_rows
from .progress import TerminalProgress

app = typer.Typer(no_args_is_help=True, add_completion=False)

READY = "ready"
COLUMNS = ["tenant", "adapter", "aliases", "version", "new_version", "state", "reason"]

Report = Annotated[Path, typer.Option(help="File that records the progress.")]
DEFAULT_REPORT = Path("rebase.json")


@app.command("push")
def push(
    to: Annotated[str, typer.Option(help="URL of the new base's server.")],
    report: Report = DEFAULT_REPORT,
    as_json: AsJson = False,
) -> None:
    """Push the versions behind aliases and the newest versions to a server of another base. The old
    base is not changed. Versions that exist are skipped, so the command can be repeated."""
    rows: list[dict[str, Any]] = []
    with open_client() as operator:
        tenants = [tenant["slug"] for tenant in operator.admin.pages("/tenants")]
    for tenant in tenants:
        with _acting_on(tenant) as old, _acting_on(tenant, to) as new:
            if old.get("/base")["base_id"] == new.get("/base")["base_id"]:
                raise CommandFailed(f"{to} serves the same base: nothing to do.")
            for row in _push_all(old, new):
                rows.append({"tenant": tenant, **row})
                report.write_text(json.dumps(rows, indent=2) + "\n")
    _print(rows, as_json=as_json)
    missing = [row for row in rows if row["state"] != READY]
    if missing:
        raise CommandFailed(f"{len(missing)} of {len(rows)} cannot be served by the new base.")


@app.command("switch")
def switch(
    report: Report = DEFAULT_REPORT,
    back: Annotated[
        bool, typer.Option("--back", help="Switch back to the old base's versions.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Switch even if some versions were rejected; their aliases stay."
        ),
    ] = False,
) -> None:
    """Point every alias of the report at its new version; ends canaries."""
    try:
        rows: list[dict[str, Any]] = json.loads(report.read_text())
    except (OSError, ValueError) as exc:
        raise CommandFailed(f"{report}: {exc}", ExitCode.USAGE) from exc
    missing = [row for row in rows if row["state"] != READY]
    if missing and not force:
        raise CommandFailed(
            f"{len(missing)} of {len(rows)} were not accepted; --force skips those.",
            ExitCode.CONFLICT,
        )
    num_moved = 0
    for row in rows:
        if row["state"] != READY:
            continue
        with _acting_on(row["tenant"]) as client:
            for alias in row["aliases"]:
                path = api_path("adapters", row["adapter"], "aliases", alias)
                client.put(path, {"version": row["version" if back else "new_version"]})
                num_moved += 1
    note(f"Moved {num_moved} aliases.")


def _push_all(old: ApiClient, new: ApiClient) -> Iterator[dict[str, Any]]:
    """Every version of the tenant that is in use, and what became of it over there."""
    for adapter in old.pages("/adapters"):
        for number, aliases in _in_use(old, adapter["name"]).items():
            yield {
                "adapter": adapter["name"],
                "aliases": aliases,
                "version": number,
                **_push_one(old, new, adapter["name"], number),
            }


def _in_use(client: ApiClient, name: str) -> Mapping[int, list[str]]:
    """The versions that aliases mean, with those aliases, and the newest that is ready."""
    found: dict[int, list[str]] = {}
    for alias in client.get(api_path("adapters", name, "aliases"))["data"]:
        found.setdefault(alias["version"], []).append(alias["alias"])
    base_id = client.get("/base")["base_id"]
    ready = [
        version["version"]
        for version in client.get(api_path("adapters", name, "versions"))["data"]
        if version["state"] == READY and version["base_id"] == base_id
    ]
    if ready:
        found.setdefault(max(ready), [])
    return found


def _push_one(old: ApiClient, new: ApiClient, name: str, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = api_path("adapters", name, "versions", number, "files")
        progress = TerminalProgress(is_quiet=True)
        download_adapter(old, path, Path(folder), force=False, progress=progress)
        try:
            adapter = read_adapter(Path(folder))
            pushed = push_adapter(new, adapter, name, aliases=[], base_id=None, progress=progress)
            settled = wait_until_settled(new, pushed)
        except ClientError as exc:
            return {"new_version": None, "state": "rejected", "reason": str(exc)}
    return {"new_version": settled["version"], "state": settled["state"], "reason": None}


def _acting_on(tenant: str, url: str | None = None) -> Any:
    found = find_connection()
    return open_client(Connection(url or found.url, found.key, tenant))


def _print(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, COLUMNS)
