"""`loraplex quotas`: shows and sets a tenant's limits and their usage."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .client import api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

NO_LIMIT = "none"


def _check_limit(value: str | None) -> str | None:
    if value is not None and value != NO_LIMIT and not value.isdecimal():
        raise typer.BadParameter(f"{value!r} is neither an integer nor {NO_LIMIT!r}.")
    return value


def _limit(help_text: str) -> Any:
    return typer.Option(metavar="N|none", callback=_check_limit, help=help_text)


Limit = str | None


@app.command("show")
def show(as_json: AsJson = False) -> None:
    """Show limits and their current usage; operators pass --tenant."""
    with open_client() as client:
        use = client.get("/quota")
    if as_json:
        print_json(use)
        return
    limits = {name: value for name, value in use.items() if isinstance(value, dict)}
    rows = [_row(name, value) for name, value in limits.items()]
    print_rows(rows, ["limit", "of", "used", "reserved", "remaining", "reset_seconds"])
    typer.echo(f"The {use['period']} ends at {use['period_ends_at']}.")


@app.command("set")
def set_(
    slug: Annotated[str, typer.Argument(help="The tenant.")],
    requests_per_minute: Annotated[Limit, _limit("Requests a minute.")] = None,
    input_tokens_per_minute: Annotated[Limit, _limit("Prompt tokens a minute.")] = None,
    output_tokens_per_minute: Annotated[Limit, _limit("Generated tokens a minute.")] = None,
    concurrent_requests: Annotated[Limit, _limit("Requests at once.")] = None,
    tokens_per_period: Annotated[Limit, _limit("Tokens a day or month.")] = None,
    trained_tokens_per_period: Annotated[
        Limit, _limit("Tokens of fine-tuning jobs a day or month.")
    ] = None,
    period: Annotated[str | None, typer.Option(help="day or month, in UTC.")] = None,
    adapters: Annotated[Limit, _limit("Adapters.")] = None,
    versions_per_adapter: Annotated[Limit, _limit("Versions of one adapter.")] = None,
    stored_bytes: Annotated[Limit, _limit("Bytes of stored adapters.")] = None,
    keys: Annotated[Limit, _limit("Keys.")] = None,
    users: Annotated[Limit, _limit("Users.")] = None,
    as_json: AsJson = False,
) -> None:
    """Set a tenant's limits (operators only); other limits stay unchanged."""
    given = {
        "requests_per_minute": requests_per_minute,
        "input_tokens_per_minute": input_tokens_per_minute,
        "output_tokens_per_minute": output_tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "tokens_per_period": tokens_per_period,
        "trained_tokens_per_period": trained_tokens_per_period,
        "adapters": adapters,
        "versions_per_adapter": versions_per_adapter,
        "stored_bytes": stored_bytes,
        "keys": keys,
        "users": users,
    }
    changes: dict[str, Any] = {name: _number(text) for name, text in given.items() if text}
    if period is not None:
        changes["period"] = period
    if not changes:
        raise CommandFailed("Name a limit to set; --help lists them.", ExitCode.USAGE)
    _print_limits(_change(slug, changes), as_json=as_json)


@app.command("set-caller")
def set_caller(
    of_key: Annotated[str | None, typer.Option(metavar="ID", help="The key.")] = None,
    of_user: Annotated[str | None, typer.Option(metavar="ID", help="The user.")] = None,
    requests_per_minute: Annotated[Limit, _limit("Requests a minute.")] = None,
    input_tokens_per_minute: Annotated[Limit, _limit("Prompt tokens a minute.")] = None,
    output_tokens_per_minute: Annotated[Limit, _limit("Generated tokens a minute.")] = None,
    concurrent_requests: Annotated[Limit, _limit("Requests at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """Set limits of a key or user, besides its tenant's; its other limits stay unchanged."""
    path = _path_of_caller(of_key, of_user)
    given = {
        "requests_per_minute": requests_per_minute,
        "input_tokens_per_minute": input_tokens_per_minute,
        "output_tokens_per_minute": output_tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    changes = {name: _number(text) for name, text in given.items() if text}
    with open_client() as client:
        before = client.get(path)
        limits = client.put(path, {**{name: before[name] for name in given}, **changes})
    _print_limits(limits, as_json=as_json)


def _path_of_caller(key: str | None, user: str | None) -> str:
    """The path of the limits of the key or user that is named."""
    if key is not None and user is None:
        return api_path("keys", key, "limits")
    if user is not None and key is None:
        return api_path("users", user, "limits")
    raise CommandFailed("Name one of --of-key and --of-user.", ExitCode.USAGE)


def _change(slug: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The limits after the change. Refused if another caller changes them meanwhile."""
    path = api_path("tenants", slug, "quota")
    with open_client() as client:
        limits, etag = client.admin.get_tagged(path)
        kept = {name: limits[name] for name in limits.keys() - {"tenant", "object"}}
        changed: dict[str, Any] = client.admin.put(path, {**kept, **changes}, if_match=etag)
        return changed


def _print_limits(limits: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(limits)
        return
    rows = [{"limit": name, "of": limits[name]} for name in limits if name != "object"]
    print_rows(rows, ["limit", "of"])


def _row(name: str, use: dict[str, Any]) -> dict[str, Any]:
    seconds = use["reset_seconds"]
    rest = {"limit": name, "of": use["limit"], "reset_seconds": seconds and round(seconds, 1)}
    return {**use, **rest}


def _number(text: str) -> int | None:
    return None if text == NO_LIMIT else int(text)
