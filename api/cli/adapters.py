"""`loraplex adapters`: manages the tenant's adapters through the API."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...adapters.classification import Task
from ..client.downloads import download_adapter
from ..client.errors import ClientError
from ..client.local_adapter import read_adapter
from ..client.references import LIVE, version_path
from ..client.sources.source import open_source
from . import aliases, gates, pins
from .client import ApiClient, api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .imports import import_
from .output import AsJson, note, print_json, print_rows
from .progress import TerminalProgress
from .push import upload, wait
from .references import Name, Version
from .validate import validate

app = typer.Typer(no_args_is_help=True, add_completion=False)

Source = Annotated[
    str,
    typer.Argument(
        help="Folder written by PEFT's save_pretrained or a Trainer, its .tar, .tar.gz or .zip, "
        "hf://OWNER/NAME[@REVISION][/FOLDER], or s3://BUCKET/PREFIX."
    ),
]
LISTED = ["name", "latest", "versions", "aliases", "task", "tier", "requests", "last_used"]


@app.command("push")
def push(
    source: Source,
    name: Name,
    alias: Annotated[
        list[str] | None, typer.Option(help="Alias to set once the version is ready; repeatable.")
    ] = None,
    base_id: Annotated[
        str | None, typer.Option(help="Fail unless the server runs this base.")
    ] = None,
    is_waiting: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the version is ready.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Upload an adapter, wait until it is checked and measured, and print how to call it. After a
    broken connection, run it again: the upload resumes."""
    progress = TerminalProgress(is_quiet=as_json)
    with open_source(source, progress) as folder, open_client() as client:
        adapter = read_adapter(folder)
        version = upload(
            client, adapter, name, aliases=alias or [], base_id=base_id, progress=progress
        )
        if is_waiting:
            version = wait(client, version)
        if as_json:
            print_json(version)
        else:
            _print_pushed(client, version, alias or [])


@app.command("list")
@app.command("ls", hidden=True)
def list_(as_json: AsJson = False) -> None:
    """List your adapters."""
    with open_client() as client:
        adapters = list(client.pages("/adapters"))
    if as_json:
        print_json(adapters)
    else:
        print_rows([_adapter_row(adapter) for adapter in adapters], LISTED)


@app.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show an adapter's versions, their location and measured effect."""
    with open_client() as client:
        adapter = client.get(api_path("adapters", name))
    if as_json:
        print_json(adapter)
        return
    rows = [_version_row(version) for version in adapter["versions"]]
    print_rows(
        rows, ["version", "state", "aliases", "tier", "task", "rank", "effect", "digest", "reason"]
    )
    for alias, split in adapter["canaries"].items():
        note(f"{name}@{alias} sends {split['percent']:g} % to {name}@{split['version']}")
    ready = [version for version in adapter["versions"] if version["state"] == "ready"]
    newest = max(ready, key=lambda version: version["version"], default=None)
    if newest is not None and newest["task"] == Task.CLASSIFY:
        note(_how_to_classify(client.url, newest["id"], newest))


@app.command("versions")
def versions(name: Name, as_json: AsJson = False) -> None:
    """List an adapter's versions with state, history and content."""
    with open_client() as client:
        listed = client.get(api_path("adapters", name, "versions"))["data"]
    if as_json:
        print_json(listed)
        return
    rows = [_version_row(version) for version in listed]
    columns = ["version", "state", "state_changed_at", "size_bytes", "features", "created_at"]
    print_rows(rows, [*columns, "reason"])


@app.command("rm")
def remove(
    name: Name,
    version: Annotated[int | None, typer.Option(min=1, help="Only this version.")] = None,
    drain: Annotated[
        float,
        typer.Option(
            min=0, max=600, help="Seconds to let running requests finish before they are aborted."
        ),
    ] = 30.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete an adapter with all its versions, or one version, and wait until it is erased.

    A version that an alias points to cannot be deleted: move or remove the alias first.
    """
    part = () if version is None else ("versions", version)
    with open_client() as client:
        if version is None:
            _check_no_alias(client, name)
        if not yes:
            _confirm_deletion(client, name, version)
        try:
            deleted = client.delete(api_path("adapters", name, *part), drain_seconds=drain)
        except KeyboardInterrupt:
            raise CommandFailed(
                "Interrupted. The deletion continues; its receipt is kept under "
                f"/v1{api_path('adapters', name, 'deletions')}.",
                ExitCode.INTERRUPTED,
            ) from None
    if as_json:
        print_json(deleted)
        return
    for entry in deleted["versions"]:
        typer.echo(f"deleted {name}@{entry['version']}  {entry['digest']}{_receipt(entry)}")


def _check_no_alias(client: ApiClient, name: str) -> None:
    """Raise CommandFailed if requests may still reach the adapter by an alias."""
    aliases: dict[str, int] = client.get(api_path("adapters", name))["aliases"]
    if aliases:
        named = ", ".join(f"{name}@{alias}" for alias in aliases)
        commands = "".join(f"\n  loraplex adapters alias rm {name} {alias}" for alias in aliases)
        raise CommandFailed(
            f"Requests may still use {named}. Remove the alias first:{commands}", ExitCode.CONFLICT
        )


def _confirm_deletion(client: ApiClient, name: str, version: int | None) -> None:
    """Ask the person at the terminal. Raises CommandFailed unless the answer is yes."""
    if version is not None:
        what = f"{name}@{version}"
    else:
        number = len(client.get(api_path("adapters", name))["versions"])
        what = f"{name} with all its {number} versions" if number > 1 else name
    if not sys.stdin.isatty():
        raise CommandFailed(f"Not confirmed: add --yes to delete {what}.", ExitCode.USAGE)
    if not typer.confirm(f"Delete {what} permanently?", err=True):
        raise CommandFailed("Nothing was deleted.", ExitCode.FAILED)


@app.command("download")
def download(
    version: Version,
    directory: Annotated[Path, typer.Argument(help="Created if missing.")],
    force: Annotated[bool, typer.Option(help="Overwrite existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download an adapter as PEFT files, identical to what was pushed."""
    with open_client() as client:
        path = version_path(client, version, "files")
        progress = TerminalProgress(is_quiet=as_json)
        files = download_adapter(client, path, directory, force=force, progress=progress)
    if as_json:
        print_json([str(file) for file in files])
    else:
        for file in files:
            typer.echo(file)


@app.command("uploads")
def uploads(as_json: AsJson = False) -> None:
    """List unfinished uploads; they occupy disk space on the server."""
    with open_client() as client:
        unfinished = client.get("/uploads")["data"]
    if as_json:
        print_json(unfinished)
    else:
        print_rows(unfinished, ["id", "adapter", "state", "received_bytes", "size_bytes"])


@app.command("abandon")
def abandon(
    upload_id: Annotated[str, typer.Argument(help="Upload id from `loraplex adapters uploads`.")],
    as_json: AsJson = False,
) -> None:
    """Abandon an unfinished upload and delete its bytes."""
    with open_client() as client:
        abandoned = client.delete(api_path("uploads", upload_id))
    if as_json:
        print_json(abandoned)
    else:
        typer.echo(f"abandoned {abandoned['id']} of {abandoned['adapter']}")


app.command("import")(import_)
app.command("validate")(validate)
app.command("rollback")(aliases.rollback)
app.command("pin")(pins.pin)
app.command("unpin")(pins.unpin)
app.command("prefetch")(pins.prefetch)
app.command("why")(pins.why)
app.add_typer(gates.app, name="gate", help="Set, show and remove the gates of aliases.")
app.add_typer(aliases.app, name="alias", help="Move, split, roll back and remove aliases.")


def _print_pushed(client: ApiClient, version: dict[str, Any], aliases: list[str]) -> None:
    typer.echo(version["id"])
    note(f"{version['digest']}  {version['state']}  {_effect(version)}")
    for warning in version["report"]["warnings"]:
        note(f"Warning: {warning['message']}")
    if version["state"] != "ready":
        return
    name, _, number = version["id"].rpartition("@")
    targets = _targets(client, version["adapter"])
    is_set = [alias for alias in aliases if targets.get(alias) == version["version"]]
    model = f"{name}@{is_set[0] if is_set else number}"
    is_classifier = version["task"] == Task.CLASSIFY
    url = client.url
    note(_how_to_classify(url, model, version) if is_classifier else _how_to_call(url, model))
    is_live = targets.get(LIVE) in (None, version["version"])
    for alias in dict.fromkeys([*aliases, *([] if is_live else [LIVE])]):
        if targets and alias not in is_set:
            action = f"Move {alias} through its gate" if alias in aliases else "Make it live"
            note(
                f"{action}: loraplex adapters alias set {version['adapter']} {alias} "
                f"{version['version']}"
            )


def _targets(client: ApiClient, name: str) -> dict[str, int]:
    """The versions of the adapter's aliases; none for a key that may not ask."""
    try:
        aliases: dict[str, int] = client.get(api_path("adapters", name))["aliases"]
    except ClientError:  # the push is done: what only adds a hint does not fail it
        return {}
    return aliases


def _how_to_call(url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    return (
        f"Call it:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -H "Authorization: Bearer $LORAPLEX_API_KEY" \\\n'
        f"    -d '{json.dumps(body)}'\n"
        f"or, with the openai package:\n"
        f'  client = OpenAI(base_url="{url}/v1", api_key=os.environ["LORAPLEX_API_KEY"])\n'
        f'  client.chat.completions.create(model="{model}", messages=[...])'
    )


def _how_to_classify(url: str, model: str, version: dict[str, Any]) -> str:
    """A head of one label scores pairs of texts."""
    is_scorer = len(version["report"]["classification"]["labels"]) == 1
    path = "rerank" if is_scorer else "classify"
    texts = {"query": "Hello", "documents": ["Hi"]} if is_scorer else {"input": ["Hello"]}
    body = {"model": model, **texts}
    return (
        f"This classifier generates no text. Call it:\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n"
        f'    -H "Authorization: Bearer $LORAPLEX_API_KEY" \\\n'
        f"    -d '{json.dumps(body)}'"
    )


def _adapter_row(adapter: dict[str, Any]) -> dict[str, Any]:
    return {
        **adapter,
        "latest": f"{adapter['latest_version']}:{adapter['state']}",
        "versions": adapter["num_versions"],
        "aliases": [f"{alias}={number}" for alias, number in adapter["aliases"].items()],
    }


def _version_row(version: dict[str, Any]) -> dict[str, Any]:
    report, reason = version["report"], version["reason"]
    return {
        **version,
        "rank": f"{report['min_rank']}-{report['max_rank']}",
        "features": version["features"] or None,
        "effect": _effect(version),
        "reason": reason and reason["code"],
    }


def _effect(version: dict[str, Any]) -> str:
    attested = version["attestation"]
    if not attested:
        return "not attested"
    effect = (
        f"moves logits by up to {attested['max_logit_delta']:.3g}"
        f" (noise {attested['noise_floor']:.1g})"
    )
    drift = attested["reference"]
    if isinstance(drift, str):
        return effect
    return f"{effect}, KL to the unquantized base up to {drift['kl_max']:.2g}"


def _receipt(entry: dict[str, Any]) -> str:
    """The receipt as text."""
    receipt = entry["receipt"] or {}
    if receipt.get("is_content_shared"):
        return ", shared with another version"
    engine = receipt.get("engine")
    if not engine:
        return ""
    return (
        f"  device {engine['device_bytes']} bytes zeroed, host {engine['host_bytes']} bytes freed,"
        f" {engine['num_drained']} requests ended, {engine['num_aborted']} aborted"
    )
