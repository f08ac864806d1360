"""What `--speculation` says: who guesses tokens."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ...engine.config import PROPOSERS
from ...engine.messages import EngineInfo

OFF = "off"


def parse_speculation(values: Sequence[str]) -> tuple[str, ...]:
    """The entries of `EngineConfig.speculation`, given one by one or with commas between them."""
    entries = [entry.strip() for value in values for entry in value.split(",") if entry.strip()]
    if entries == [OFF]:
        return ()
    names = [entry.partition(":")[0] for entry in entries]
    for name in names:
        if name == OFF:
            raise typer.BadParameter(f"{OFF} goes with no other", param_hint="--speculation")
        if name not in PROPOSERS:
            known = ", ".join(PROPOSERS)
            raise typer.BadParameter(f"{name} is none of {known}", param_hint="--speculation")
    if len(set(names)) < len(names):
        raise typer.BadParameter("a proposer comes twice", param_hint="--speculation")
    return tuple(entries)


def describe_speculation(info: EngineInfo) -> str:
    """One line for whoever started the server."""
    if not info.proposers:
        return "No speculation: one token a step"
    names = ", ".join(info.proposers)
    return f"Speculation: {names}; up to {info.max_draft_tokens} guesses a step, {info.acceptance}"
