"""`loraplex adapters`: a tenant's own adapters, through the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...platform.names import is_adapter_name, is_alias_name
from .client import ApiClient, api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json, print_rows
from .push import push_adapter, read_adapter, wait_until_settled

app = typer.Typer(no_args_is_help=True, add_completion=False)
alias_app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(alias_app, name="alias", help="Move and remove aliases.")

LIVE = "prod"
"""The alias that a bare name means."""


def _check_name(name: str) -> str:
    if not is_adapter_name(name):
        raise CommandFailed(
            f"{name!r} is no adapter's name. Give the adapter's own name, such as support-bot, "
            "without tenant/ or @version: a-z, 0-9, '.', '_' and '-', at most 64 of them.",
            ExitCode.USAGE,
        )
    return name


def _check_alias(alias: str) -> str:
    if not is_alias_name(alias):
        raise CommandFailed(
            f"{alias!r} is no alias. Give it alone, such as prod; a number names a version.",
            ExitCode.USAGE,
        )
    return alias


Name = Annotated[str, typer.Argument(callback=_check_name, help="The adapter's own name.")]
Alias = Annotated[str, typer.Argument(callback=_check_alias, help="Such as prod.")]


@app.command("push")
def push(
    path: Annotated[Path, typer.Argument(help="The folder that PEFT's save_pretrained wrote.")],
    name: Name,
    alias: Annotated[
        list[str] | None, typer.Option(help="Set on the version once it is ready; may be repeated.")
    ] = None,
    base_id: Annotated[
        str | None, typer.Option(help="Refuse unless the server runs this base.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the version is ready.")] = True,
    as_json: AsJson = False,
) -> None:
    """Send an adapter, have it examined and its effect measured, and print how to call it.

    Run it again after a broken connection: it goes on where it stopped.
    """
    adapter = read_adapter(path)
    with open_client() as client:
        version = push_adapter(
            client, adapter, name, aliases=alias or [], base_id=base_id, is_quiet=as_json
        )
        if wait:
            version = wait_until_settled(client, version)
        if as_json:
            print_json(version)
        else:
            _print_pushed(client, version)


@app.command("ls")
def list_(as_json: AsJson = False) -> None:
    """List your adapters."""
    with open_client() as client:
        adapters = client.get("/adapters")["data"]
    if as_json:
        print_json(adapters)
    else:
        print_rows([_adapter_row(adapter) for adapter in adapters], ["name", "versions", "aliases"])


@app.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show an adapter's versions, where their weights are, and their measured effect."""
    with open_client() as client:
        adapter = client.get(api_path("adapters", name))
    if as_json:
        print_json(adapter)
        return
    rows = [_version_row(version) for version in adapter["versions"]]
    print_rows(rows, ["version", "state", "aliases", "tier", "rank", "effect", "digest", "reason"])


@app.command("rm")
def remove(
    name: Name,
    version: Annotated[int | None, typer.Option(min=1, help="Only this version.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete an adapter or one version; returns when nothing of it is left anywhere."""
    part = () if version is None else ("versions", version)
    with open_client() as client:
        receipt = client.delete(api_path("adapters", name, *part))
    if as_json:
        print_json(receipt)
        return
    for deleted in receipt["versions"]:
        shared = ", shared with another version" if deleted["is_content_shared"] else ""
        typer.echo(f"deleted {name}@{deleted['version']}  {deleted['digest']}{shared}")


@alias_app.command("set")
def set_alias(
    name: Name,
    alias: Alias,
    version: Annotated[int, typer.Argument(min=1)],
    as_json: AsJson = False,
) -> None:
    """Point an alias at a ready version; new requests follow it at once."""
    with open_client() as client:
        answer = client.put(api_path("adapters", name, "aliases", alias), {"version": version})
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{name}@{alias} is now {name}@{version}")


@alias_app.command("rm")
def remove_alias(name: Name, alias: Alias, as_json: AsJson = False) -> None:
    """Forget an alias; the version it points at stays."""
    with open_client() as client:
        client.delete(api_path("adapters", name, "aliases", alias))
    if as_json:
        print_json({"adapter": name, "alias": alias, "deleted": True})
    else:
        typer.echo(f"removed {name}@{alias}")


def _print_pushed(client: ApiClient, version: dict[str, Any]) -> None:
    typer.echo(version["id"])
    note(f"{version['digest']}  {version['state']}  {_effect(version)}")
    for warning in version["report"]["warnings"]:
        note(f"Warning: {warning['message']}")
    if version["state"] != "ready":
        return
    note(_how_to_call(client.url, version))
    if _live_version(client, version["adapter"]) not in (None, version["version"]):
        note(
            f"Make it live: loraplex adapters alias set {version['adapter']} {LIVE} "
            f"{version['version']}"
        )


def _live_version(client: ApiClient, name: str) -> int | None:
    """What the bare name means by its alias; None without one, and for a key that may not ask."""
    try:
        aliases: dict[str, int] = client.get(api_path("adapters", name))["aliases"]
    except CommandFailed:  # the push is done: what only adds a hint does not fail it
        return None
    return aliases.get(LIVE)


def _how_to_call(url: str, version: dict[str, Any]) -> str:
    body = {"model": version["id"], "messages": [{"role": "user", "content": "Hello"}]}
    return (
        f"Call it:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -H "Authorization: Bearer $LORAPLEX_API_KEY" \\\n'
        f"    -d '{json.dumps(body)}'\n"
        f"or, with the openai package:\n"
        f'  client = OpenAI(base_url="{url}/v1", api_key=os.environ["LORAPLEX_API_KEY"])\n'
        f'  client.chat.completions.create(model="{version["id"]}", messages=[...])'
    )


def _adapter_row(adapter: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": adapter["name"],
        "versions": [f"{entry['version']}:{entry['state']}" for entry in adapter["versions"]],
        "aliases": [f"{alias}={number}" for alias, number in adapter["aliases"].items()],
    }


def _version_row(version: dict[str, Any]) -> dict[str, Any]:
    report, reason = version["report"], version["reason"]
    return {
        **version,
        "rank": f"{report['min_rank']}-{report['max_rank']}",
        "effect": _effect(version),
        "reason": reason and reason["code"],
    }


def _effect(version: dict[str, Any]) -> str:
    attested = version["attestation"]
    if not attested:
        return "not attested"
    return (
        f"moves logits by up to {attested['max_logit_delta']:.3g}"
        f" (noise {attested['noise_floor']:.1g})"
    )
