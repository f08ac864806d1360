"""`loraplex logout`: removes a saved profile."""

from __future__ import annotations

import typer

from ..client.profiles import remove_profile
from .connection import profile_name
from .exit_codes import CommandFailed, ExitCode
from .output import note

app = typer.Typer(add_completion=False)


@app.command()
def logout() -> None:
    """Delete the profile. The key stays valid; `loraplex keys revoke` revokes it."""
    name = profile_name()
    if not remove_profile(name):
        raise CommandFailed(f"Profile not found: {name}.", ExitCode.NOT_FOUND)
    note(f"Deleted profile {name}.")
