"""`loraplex logout`: forgets a remembered key."""

from __future__ import annotations

import typer

from .connection import profile_name
from .exit_codes import CommandFailed, ExitCode
from .output import note
from .profiles import remove_profile

app = typer.Typer(add_completion=False)


@app.command()
def logout() -> None:
    """Forget the profile. The key itself goes on: `loraplex keys revoke` ends it."""
    name = profile_name()
    if not remove_profile(name):
        raise CommandFailed(f"There is no profile {name!r}.", ExitCode.NOT_FOUND)
    note(f"Forgot the profile {name!r}.")
