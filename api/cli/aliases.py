"""`loraplex adapters alias`: sets and shows aliases and their history."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..client.references import LIVE, check_alias
from .canary_limits import parse_limits
from .client import api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .gated_change import NoWait, Override, change_alias
from .numbers import check_finite
from .output import AsJson, print_json, print_rows
from .references import Alias, Name, VersionNumber

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("set")
def set_alias(
    name: Name,
    alias: Alias,
    version: VersionNumber,
    override: Override = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a ready version. New requests follow immediately, on other servers within
    three seconds. Ends a canary. If the alias has a gate, the command waits for the evaluation."""
    body = {"version": version, "override": override}
    with open_client() as client:
        answer = change_alias(client, name, alias, body, waits=not no_wait, is_quiet=as_json)
    _print_alias(answer, as_json=as_json)


@app.command("canary")
def canary(
    name: Name,
    alias: Alias,
    version: VersionNumber,
    percent: Annotated[
        float,
        typer.Option(
            callback=check_finite, help="Percentage of the alias's requests, between 0 and 100."
        ),
    ] = 10.0,
    is_watched: Annotated[
        bool, typer.Option("--watch", help="End it when it exceeds a limit; see --limit.")
    ] = False,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="Another limit than the default, or `none`: error_rate=0.02, refusals=0.05, "
            "length=1.5, latency=1.5, judge=0.1, min_requests=100. Implies --watch. Repeatable.",
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Model that compares answers of the two versions, for the limit judge. Implies "
            "--watch."
        ),
    ] = None,
    judge_percent: Annotated[
        float | None,
        typer.Option(
            callback=check_finite,
            help="Percentage of the alias's requests that both versions answer for the judge, 10 "
            "by default.",
        ),
    ] = None,
    override: Override = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Send a share of an alias's requests to another version; `alias set` ends the canary.

    With --watch, it also ends by itself when it is worse than the alias's own version. If the alias
    has a gate, the command waits for the evaluation.
    """
    wanted = parse_limits(limits or [], judge=judge, judge_percent=judge_percent)
    limits_body = wanted if is_watched or wanted else None
    with open_client() as client:
        aliases = client.get(api_path("adapters", name))["aliases"]
        if alias not in aliases:
            raise CommandFailed(
                f"{name!r} has no alias {alias!r} to split. Set it first: "
                f"loraplex adapters alias set {name} {alias} VERSION",
                ExitCode.NOT_FOUND,
            )
        body = {
            "version": aliases[alias],
            "canary": {"version": version, "percent": percent, "limits": limits_body},
            "override": override,
        }
        answer = change_alias(client, name, alias, body, waits=not no_wait, is_quiet=as_json)
    _print_alias(answer, as_json=as_json)


@app.command("shadow")
def shadow(
    name: Name,
    alias: Alias,
    version: Annotated[
        int | None, typer.Argument(min=1, help="Version that becomes the shadow.")
    ] = None,
    percent: Annotated[
        float,
        typer.Option(
            callback=check_finite, help="Percentage of the alias's requests, above 0, up to 100."
        ),
    ] = 10.0,
    is_ended: Annotated[bool, typer.Option("--end", help="End the shadow.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how an alias's shadow compares, or set or end it.

    A shadow answers copies of the alias's requests. Its answers are not sent to callers.
    """
    path = api_path("adapters", name, "aliases", alias, "shadow")
    if is_ended and version is not None:
        raise typer.BadParameter("--end takes no version")
    with open_client() as client:
        if is_ended:
            client.delete(path)
            answer = {"adapter": name, "alias": alias, "deleted": True}
        elif version is None:
            answer = client.get(path)
        else:
            answer = client.put(path, {"version": version, "percent": percent})
    if as_json:
        print_json(answer)
    elif is_ended:
        typer.echo(f"{name}@{alias} has no shadow any more")
    else:
        _print_shadow(answer)


@app.command("rm")
def remove_alias(name: Name, alias: Alias, as_json: AsJson = False) -> None:
    """Remove an alias; its version is kept."""
    with open_client() as client:
        client.delete(api_path("adapters", name, "aliases", alias))
    if as_json:
        print_json({"adapter": name, "alias": alias, "deleted": True})
    else:
        typer.echo(f"removed {name}@{alias}")


def rollback(
    name: Name,
    alias: Annotated[str, typer.Argument(callback=check_alias, help="Alias, such as prod.")] = LIVE,
    as_json: AsJson = False,
) -> None:
    """Undo the last change of an alias; repeat to go further back."""
    with open_client() as client:
        answer = client.post(api_path("adapters", name, "aliases", alias, "rollback"))
    _print_alias(answer, as_json=as_json)


app.command("rollback")(rollback)


@app.command("history")
def history(name: Name, alias: Alias, as_json: AsJson = False) -> None:
    """List an alias's changes, newest first."""
    with open_client() as client:
        changes = client.get(api_path("adapters", name, "aliases", alias, "history"))["data"]
    if as_json:
        print_json(changes)
        return
    rows = [{**change, "canary": _canary(change)} for change in changes]
    columns = ["changed_at", "action", "version", "canary", "evaluation", "changed_by"]
    print_rows(rows, [*columns, "override", "reason"])


def _print_shadow(answer: dict[str, Any]) -> None:
    name = answer["adapter"]
    typer.echo(
        f"{name}@{answer['version']} answers copies of {answer['percent']:g} % of "
        f"{name}@{answer['alias']}'s requests"
    )
    shown = ["since", "compared", "errors", "equal", "rouge_l", "length_ratio"]
    print_rows([answer], shown)


def _print_alias(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    name, canary = answer["adapter"], answer["canary"]
    split = f", and {name}@{canary['version']} for {canary['percent']:g} %" if canary else ""
    split += ", watched" if canary and canary["limits"] else ""
    typer.echo(f"{name}@{answer['alias']} is now {name}@{answer['version']}{split}")


def _canary(change: dict[str, Any]) -> str | None:
    canary = change["canary"]
    if canary is None:
        return None
    return f"{canary['version']} for {canary['percent']:g} %" + ", watched" * bool(canary["limits"])
