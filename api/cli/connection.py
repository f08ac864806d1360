"""The flags `--profile`, `--url` and `--tenant`, and the connection that they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from ..client import connection as connections
from ..client.connection import Connection

Command = TypeVar("Command", bound=Callable[..., Any])

_flags: dict[str, str | None] = {}
"""The flags of this command; each command that is parsed sets them again."""


def find_connection() -> Connection:
    """The connection to use. Raises ClientError if there is no key for it."""
    return connections.find_connection(
        url=flag("url"), tenant=flag("tenant"), profile=flag("profile")
    )


def find_url() -> str:
    """The URL to use, without a path."""
    return connections.find_url(flag("url"), flag("profile"))


def find_tenant() -> str | None:
    """The tenant that an operator is to act on."""
    return connections.find_tenant(flag("tenant"), flag("profile"))


def profile_name() -> str:
    """The name of the profile to use, whether or not it exists. Raises ClientError."""
    return connections.profile_name(flag("profile"))


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
