"""The extra `engine`: torch, and what else the engine needs. Other commands do without."""

from __future__ import annotations

from importlib.util import find_spec

from .exit_codes import CommandFailed


def need_engine(what: str) -> None:
    """Raises CommandFailed with the command that installs the extra, unless torch is installed.

    `what` needs it, as the message begins: "serving".
    """
    if find_spec("torch") is None:
        raise CommandFailed(f"{what} needs torch: pip install 'loraplex[engine]'")
