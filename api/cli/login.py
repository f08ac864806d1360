"""`loraplex login`: verifies a key and saves it with its server as a profile."""

from __future__ import annotations

import os
import sys

import typer

from ..client.connection import DEFAULT_URL, Connection
from ..client.profiles import Profile, config_path, load_profiles, save_profile
from .client import open_client
from .connection import flag, profile_name
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json

app = typer.Typer(add_completion=False)


@app.command()
def login(as_json: AsJson = False) -> None:
    """Check a server and a key and save them as a profile. The key is read from a pipe on stdin,
    else from LORAPLEX_API_KEY, else from a hidden prompt; never from the command line, which other
    users can read."""
    name = profile_name()
    connection = Connection(_ask_for_url(name), _ask_for_key(), flag("tenant"))
    with open_client(connection) as client:
        me = client.get("/me")
    save_profile(name, Profile(connection.url, connection.key, connection.tenant))
    if as_json:
        print_json(me)
    who = f"{me['actor']['kind']} {me['actor']['name']!r}"
    note(f"Logged in to {connection.url} as {who}. Profile {name!r} is in {config_path()}.")


def _ask_for_url(name: str) -> str:
    profile = load_profiles().get(name)
    known = profile.url if profile else DEFAULT_URL
    given = flag("url") or os.environ.get("LORAPLEX_URL")
    if given is None and sys.stdin.isatty():
        given = typer.prompt("Server", default=known, err=True)
    return (given or known).strip().rstrip("/").removesuffix("/v1")


def _ask_for_key() -> str:
    piped = "" if sys.stdin.isatty() else sys.stdin.readline().strip()
    key = piped or os.environ.get("LORAPLEX_API_KEY", "").strip()
    if not key and sys.stdin.isatty():
        key = typer.prompt("Key", hide_input=True, err=True).strip()
    if not key:
        raise CommandFailed("No key was given.", ExitCode.AUTHENTICATION)
    return key
