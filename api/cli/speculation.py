"""Parses `--speculation`: the proposers to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ...engine.errors import InvalidParameter
from ...engine.proposer_list import parse_proposers

if TYPE_CHECKING:
    from ...engine.messages import EngineInfo


def parse_speculation(values: Sequence[str]) -> tuple[str, ...]:
    """The entries of `EngineConfig.speculation`, from repeated options or separated by commas.

    Raises BadParameter for errors that can be detected before the base is loaded.
    """
    try:
        return parse_proposers(values)
    except InvalidParameter as exc:
        problem = str(exc).removeprefix(f"{exc.param}: ")
        raise typer.BadParameter(problem, param_hint="--speculation") from exc


def describe_speculation(info: EngineInfo) -> str:
    """One line for the operator who started the server."""
    if not info.proposers:
        return "No speculation: one token a step"
    names = ", ".join(info.proposers)
    return (
        f"Speculation: {names}; up to {info.max_draft_tokens} draft tokens per step, "
        f"{info.acceptance}"
    )
