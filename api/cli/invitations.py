"""Invitation links for setting a console password."""

from __future__ import annotations

from typing import Any

import typer

from .output import note, print_json


def join_url(base_url: str, token: str) -> str:
    """The console's URL for the token; the part after '#' is never sent to a server."""
    return f"{base_url}/console/join#{token}"


def print_invitation(invitation: dict[str, Any], *, as_json: bool) -> None:
    """The link: this once, and never again."""
    if as_json:
        print_json(invitation)
    else:
        typer.echo(invitation["url"])
    note(f"The link works once, until {invitation['expires_at']}.")
