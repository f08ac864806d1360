"""Parses `--speculation`: the proposers to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ...engine.config import PROPOSERS

if TYPE_CHECKING:
    from ...engine.messages import EngineInfo

OFF = "off"
ARGUMENTS: dict[str, str | None] = {
    "ngram": None,
    "draft": "MODEL",
    "early_exit": "LAYERS",
    "medusa": "CHECKPOINT",
    "medusa_tree": "CHECKPOINT",
}
"""The argument of each proposer; None: no argument is allowed."""


def parse_speculation(values: Sequence[str]) -> tuple[str, ...]:
    """The entries of `EngineConfig.speculation`, from repeated options or separated by commas.

    Raises BadParameter for errors that can be detected before the base is loaded.
    """
    entries = [entry.strip() for value in values for entry in value.split(",") if entry.strip()]
    if entries == [OFF]:
        return ()
    names = []
    for entry in entries:
        name, _, argument = entry.partition(":")
        if objection := _objection(name, argument):
            raise typer.BadParameter(objection, param_hint="--speculation")
        names.append(name)
    if len(set(names)) < len(names):
        raise typer.BadParameter("a proposer is named twice", param_hint="--speculation")
    return tuple(entries)


def _objection(name: str, argument: str) -> str | None:
    """Why this proposer is invalid; None if it is valid."""
    if name == OFF:
        return f"{OFF} cannot be combined with other proposers"
    if name not in PROPOSERS:
        return f"{name} is not one of {', '.join(PROPOSERS)}"
    needed = ARGUMENTS[name]
    if needed is None:
        return f"{name} takes no argument" if argument else None
    if not argument:
        return f"{name} needs an argument: {name}:{needed}"
    if name == "early_exit" and (not argument.isdecimal() or int(argument) < 1):
        return f"{name} needs a number of layers, not {argument}"
    return None


def describe_speculation(info: EngineInfo) -> str:
    """One line for the operator who started the server."""
    if not info.proposers:
        return "No speculation: one token a step"
    names = ", ".join(info.proposers)
    return (
        f"Speculation: {names}; up to {info.max_draft_tokens} draft tokens per step, "
        f"{info.acceptance}"
    )
