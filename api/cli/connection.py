"""The server and key of a command, from flags, the environment or a profile.

A profile named by flag takes precedence over the environment. A profile's key is sent only to its
own URL, whatever else is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import typer

from .exit_codes import CommandFailed, ExitCode
from .profiles import DEFAULT_PROFILE, Profile, check_profile_name, load_profiles

DEFAULT_URL = "http://127.0.0.1:8000"

Command = TypeVar("Command", bound=Callable[..., Any])

_flags: dict[str, str | None] = {}
"""The flags of this command; each command that is parsed sets them again."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What a client needs."""

    url: str
    key: str = field(repr=False)
    tenant: str | None
    """On which an operator acts."""


def find_connection() -> Connection:
    """The connection to use. Raises CommandFailed if there is no key for it."""
    profile = _find_profile()
    url = find_url()
    key = _environment("LORAPLEX_API_KEY")
    if key is None and profile is not None and _plain(profile.url) == url:
        key = profile.key
    if key is None:
        raise CommandFailed(
            f"No API key for {url}: run `loraplex login`, or set LORAPLEX_API_KEY.",
            ExitCode.AUTHENTICATION,
        )
    return Connection(url, key, find_tenant())


def find_url() -> str:
    """The URL to use, without a path."""
    profile = _find_profile()
    known = DEFAULT_URL if profile is None else profile.url
    return _plain(_flags.get("url") or _environment("LORAPLEX_URL") or known)


def find_tenant() -> str | None:
    """The tenant that an operator is to act on."""
    profile = _find_profile()
    known = None if profile is None else profile.tenant
    return _flags.get("tenant") or _environment("LORAPLEX_TENANT") or known


def profile_name() -> str:
    """The name of the profile to use, whether or not it exists. Raises CommandFailed."""
    chosen = _flags.get("profile") or os.environ.get("LORAPLEX_PROFILE") or DEFAULT_PROFILE
    return check_profile_name(chosen)


def flag(name: str) -> str | None:
    """`url`, `tenant` or `profile` as this command was given it."""
    return _flags.get(name)


def asks_no_server(command: Command) -> Command:
    """Mark a command that works on this machine, in a group of others that ask a server."""
    command.__dict__["asks_no_server"] = True
    return command


def add_connection_options(command: Any) -> None:
    """Let the command, or every command below it, take `--profile`, `--url` and `--tenant`.

    What works on the database or this machine directly takes none of them: it asks no server.
    """
    for below in getattr(command, "commands", {}).values():
        add_connection_options(below)
    is_local = _takes(command, "database") or hasattr(command.callback, "asks_no_server")
    if not hasattr(command, "commands") and not is_local:
        command.params.extend(_options(command))


def _find_profile() -> Profile | None:
    name = profile_name()
    profile = load_profiles().get(name)
    is_named = _flags.get("profile") or os.environ.get("LORAPLEX_PROFILE")
    if profile is None and is_named:
        raise CommandFailed(
            f"Profile not found: {name}. Create it with `loraplex login --profile {name}`.",
            ExitCode.USAGE,
        )
    return profile


def _environment(name: str) -> str | None:
    if _flags.get("profile"):
        return None
    return os.environ.get(name, "").strip() or None


def _plain(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _takes(command: Any, name: str) -> bool:
    return any(parameter.name == name for parameter in command.params)


def _options(command: Any) -> list[Any]:
    # Made by Typer itself, from a command that is never run: its own classes for them change.
    template: Any = typer.main.get_command(_template)
    return [
        option
        for option in template.params
        if option.name in ("profile", "url", "tenant") and not _takes(command, option.name)
    ]


def _keep(parameter: typer.CallbackParam, value: str | None) -> str | None:
    _flags[str(parameter.name)] = value
    return value


_template = typer.Typer(add_completion=False)


@_template.command()
def _connect(
    profile: Annotated[
        str | None,
        typer.Option(
            callback=_keep,
            expose_value=False,
            help="Profile saved by `loraplex login`.",
            show_default="LORAPLEX_PROFILE, or default",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            callback=_keep,
            expose_value=False,
            help="The server.",
            show_default="LORAPLEX_URL, or the profile's",
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            callback=_keep,
            expose_value=False,
            metavar="SLUG",
            help="Tenant on which an operator acts.",
            show_default="LORAPLEX_TENANT, or the profile's",
        ),
    ] = None,
) -> None:
    """Only its options are used."""
