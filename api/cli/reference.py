"""Generates `docs/cli.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from . import COMMANDS, load_command

_INTRODUCTION = """\
# The command line

`loraplex COMMAND --help` says the same at the terminal. Data goes to standard output, messages to
standard error.

This page is printed by `python -m loraplex.api.cli.reference`.
"""
_TYPE_NAMES = {"int": "INTEGER", "float": "NUMBER", "Path": "PATH", "datetime": "TIME"}


def cli_reference() -> str:
    """Every command with its arguments and options."""
    lines = [
        _INTRODUCTION,
        *(f"- [`{name}`](#loraplex-{name}): {COMMANDS[name]}" for name in COMMANDS),
    ]
    for name in COMMANDS:
        lines += ["", f"## loraplex {name}"]
        lines += _described(f"loraplex {name}", load_command(name))
    return "\n".join(lines) + "\n"


def _described(path: str, command: Any) -> Iterator[str]:
    if command.help:
        yield ""
        yield " ".join(command.help.split())
    subcommands = getattr(command, "commands", None)
    if subcommands is not None:
        for name, subcommand in subcommands.items():
            if subcommand.hidden:
                continue
            yield ""
            yield f"### {path} {name}"
            yield from _described(f"{path} {name}", subcommand)
        return
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [part for part in shown if part.param_type_name == "argument"]
    options = [part for part in shown if part.param_type_name == "option" and part.name != "help"]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_usage_of, arguments)])
    yield from ("", "```", usage, "```")
    if arguments or options:
        yield from ("", "| | default | meaning |", "|---|---|---|")
        yield from map(_row, (*arguments, *options))


def _usage_of(argument: Any) -> str:
    name = _metavar(argument)
    name = f"{name}..." if argument.nargs != 1 else name
    return name if argument.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{_metavar(parameter)}`"
    else:
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if not parameter.is_flag:
            names += f" {_metavar(parameter)}"
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    if parameter.envvar:
        meaning = f"{meaning} (`{parameter.envvar}`)".strip()
    return f"| {names} | {_default(parameter)} | {_escaped(meaning)} |"


def _metavar(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    descriptor = parameter.type_descriptor
    if descriptor.is_choice:
        return _escaped("|".join(str(getattr(each, "value", each)) for each in descriptor.choices))
    return _TYPE_NAMES.get(parameter.bare_type(), "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(getattr(parameter, "show_default", None), str):
        return str(parameter.show_default)
    value = parameter.default
    if value is None or callable(value) or value is False or value == ():
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    shown = ",".join(str(getattr(each, "value", each)) for each in values)
    return f"`{shown}`" if shown else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(cli_reference())
