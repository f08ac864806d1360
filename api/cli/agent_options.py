"""The options with which replicas on Ray start, as on the command line of `loraplex agent`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

CHOSEN_BY_NODES = (
    *("--listen", "--data-dir", "--certificates"),
    *("--num-local-ranks", "--rank-address", "--rank-secret"),
    "--role",
)
"""Options of an agent that a node's own folders and addresses decide, and its role: replicas on Ray
are alike."""


def agent_options(context: typer.Context) -> tuple[str, ...]:
    """What a command was told that `loraplex agent` has to know too, by options, variables or a
    file. Nodes have neither these variables nor the file."""
    from . import load_command

    names = {each.name for each in load_command("agent").params}
    return tuple(
        argument
        for option in context.command.params
        if option.name in names and _is_passed(context, option)
        for argument in _arguments(option, context.params[option.name])
    )


def _is_passed(context: typer.Context, option: Any) -> bool:
    if option.param_type_name != "option" or option.name == "config":
        return False
    source = context.get_parameter_source(option.name)
    is_given = source is not None and source.name != "DEFAULT"
    return is_given and option.opts[0] not in CHOSEN_BY_NODES


def _arguments(option: Any, value: Any) -> Iterator[str]:
    """The option with its value as on a command line; the folder of a model as an absolute path,
    since agents run in other folders."""
    if option.is_flag:
        # Without a negation, only True can be said, and False is the default.
        yield from (option.opts if value else option.secondary_opts)[:1]
        return
    for each in value if option.multiple else [value]:
        is_folder = option.name == "model" and Path(each).is_dir()
        yield from (option.opts[0], str(Path(each).absolute() if is_folder else each))
