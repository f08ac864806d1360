"""The `loraplex` command.

Each entry of `COMMANDS` is a module of this package with a Typer called `app`. It is imported only
when its command is called, so `loraplex --help` stays fast.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...engine.errors import EngineError, UnsupportedModel
from ...platform.errors import PlatformError
from ...platform.version import __version__
from ..client.errors import ClientError
from .connection import add_connection_options
from .exit_codes import CommandFailed, exit_code_of

COMMANDS: Mapping[str, str] = {
    "serve": "Serve a base model and its tenants' adapters.",
    "agent": "Serve a base model as a replica of a fleet.",
    "ranks": "Run ranks of a base model that is divided among several hosts.",
    "fleet": "Manage the replicas of a fleet.",
    "login": "Save a server URL and API key as a profile.",
    "logout": "Delete a profile.",
    "whoami": "Show the owner and permissions of the current key.",
    "adapters": "Push, list, alias and remove adapters.",
    "keys": "Create, list, rotate and revoke a tenant's API keys.",
    "users": "Add, change and disable a tenant's users.",
    "samples": "Keep, list, export and delete samples of an adapter's requests.",
    "webhooks": "Send a tenant's events to its own servers.",
    "tenants": "Create, list, change, suspend and resume tenants.",
    "quotas": "Show and set a tenant's limits and their current usage.",
    "budgets": "Show and set what a tenant, its users and its keys may spend.",
    "prices": "Set, end and list what tokens cost.",
    "usage": "Show usage by day, adapter, version or tenant.",
    "export": "Export a tenant's data into a folder.",
    "requests": "Show finished and running requests.",
    "chat": "Chat with an adapter or the base model.",
    "batch": "Answer files of requests in the background.",
    "eval": "Compare a version of an adapter with another one on a golden set.",
    "golden-sets": "Set, list and remove the golden sets of an adapter.",
    "tune": "Train an adapter from a file of examples.",
    "jobs": "List, show, watch, pause and cancel fine-tuning jobs.",
    "models": "Check how a base model is served, without a server.",
    "plan": "Compute the memory that a load needs, before hardware is bought.",
    "top": "Watch a server's requests, queues and memory.",
    "doctor": "Check the installation and the configured server (read-only).",
    "operators": "Create the first operator and manage operators.",
    "audit": "Show, export and verify the audit log.",
    "rebase": "Move every tenant's adapters to another base model.",
    "db": "Upgrade the database schema.",
    "gc": "Remove unreferenced objects and uploads.",
    "demo": "Serve three small adapters of two tenants and query them concurrently.",
    "bench": "Measure serving speed on this machine.",
    "quantize": "Make a quantized checkpoint, calibrated with a text.",
    "drafts": "Train heads and choose layers for speculative decoding.",
}

ASKING_A_SERVER = frozenset(
    {
        *("login", "logout", "whoami", "adapters", "keys", "users", "tenants", "quotas"),
        *("operators", "audit", "usage", "fleet", "webhooks", "budgets", "prices", "export"),
        "samples",
        *("requests", "chat", "batch", "eval", "tune", "jobs", "top", "doctor", "rebase"),
        "golden-sets",
    }
)
"""Those of which every command takes `--profile`, `--url` and `--tenant`, unless it works on the
database or this machine."""


class LazyGroup(TyperGroup):
    """Knows its commands by name and one line of help, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder with the command's name and help."""
        if cmd_name not in COMMANDS:
            return None
        return TyperGroup(name=cmd_name, help=COMMANDS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, in full. Similar names are suggested for one that is not
        there."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        name, stand_in, rest = super().resolve_command(ctx, args)
        if name is None or stand_in is None:
            return name, None, rest
        return name, load_command(name), rest


def main() -> int:
    """Run the command line in `sys.argv`; returns the exit code."""
    try:
        app(prog_name="loraplex")
    except (PlatformError, EngineError, ClientError, CommandFailed) as exc:
        code = f" ({exc.code})" if isinstance(exc, UnsupportedModel) else ""
        typer.echo(f"Error: {exc}{code}", err=True)
        return exit_code_of(exc)
    return 0


def load_command(name: str) -> Any:
    """The command of `COMMANDS` in full, with all below it."""
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    command = typer.main.get_command(module.app)
    command.name = name
    _describe_plainly(command)
    if name in ASKING_A_SERVER:
        add_connection_options(command)
    return command


def _describe_plainly(command: Any) -> None:
    """Rich's tables cut long options short in a terminal of 80 columns."""
    command.rich_markup_mode = None
    for below in getattr(command, "commands", {}).values():
        _describe_plainly(below)


app = typer.Typer(
    name="loraplex",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve thousands of tenants' LoRA adapters from one base model, every batch mixed.",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"loraplex {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Without a callback Typer would take the only command for the whole."""


if __name__ == "__main__":
    sys.exit(main())
