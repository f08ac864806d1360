"""Where the values of a command's options come from: the command line, variables, or the file of
`--config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings import Origin, Settings, Source, environment_variable, load_settings
from ..vllm_names import explain_option
from .exit_codes import CommandFailed, ExitCode
from .settings_file import FileValue, read_settings_file

_PLACES = "loraplex.settings_file"
_SERVERS = ("serve", "agent")
"""A file may have every option of both."""
_SOURCES: Mapping[str, Source] = {
    "COMMANDLINE": "flag",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "file",
}


def use_settings_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Let the options of this command have the file's values by default.

    Raises CommandFailed for a key that no option has.
    """
    if path is None:
        return None
    given = read_settings_file(path)
    known = {key: option for option in ctx.command.params for key in _keys(option)}
    for key, value in given.items():
        if key not in known:
            _check_key(key, value.place, set(known))
    values: dict[str, str | list[str]] = {}
    places: dict[str, str] = {}
    for key, value in given.items():
        if key in known:
            name = str(known[key].name)
            if name in values:
                raise CommandFailed(f"{value.place}: {places[name]} says the same.", ExitCode.USAGE)
            values[name], places[name] = _value(known[key], value), value.place
    ctx.default_map, ctx.meta[_PLACES] = values, places
    return path


def settings_of(ctx: typer.Context, **given: Any) -> Settings:
    """The settings of a command that has options of some of them, whose values are `given`.

    Raises InvalidValue for the first invalid one, which it names as the user wrote it.
    """
    return load_settings(origins=origins_of(ctx), **given)


def origins_of(ctx: typer.Context) -> Mapping[str, Origin]:
    """Where each parameter of the command got its value."""
    return {
        str(option.name): origin_of(ctx, option)
        for option in ctx.command.params
        if option.param_type_name == "option"
    }


def origin_of(ctx: Any, option: Any) -> Origin:
    """Where the option of the command got its value."""
    source = _SOURCES.get(ctx.get_parameter_source(option.name).name, "default")
    match source:
        case "environment":
            return Origin(source, option.envvar)
        case "file":
            return Origin(source, ctx.meta[_PLACES][option.name])
    return Origin(source, option.opts[0])


def _keys(option: Any) -> Iterator[str]:
    """The option's keys in a file. The file cannot name another one."""
    if option.param_type_name == "option" and option.envvar and option.name != "config":
        yield from (flag.removeprefix("--") for flag in option.opts)


def _check_key(key: str, place: str, known: set[str]) -> None:
    """Raises CommandFailed unless another kind of server has this option."""
    from . import load_command

    for server in _SERVERS:
        known |= {each for option in load_command(server).params for each in _keys(option)}
    if key in known:
        return
    if explained := explain_option(key):
        raise CommandFailed(f"{place}: {explained}", ExitCode.USAGE)
    near = get_close_matches(key, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else " `loraplex serve --help` lists all options."
    raise CommandFailed(f"{place}: There is no such option.{hint}", ExitCode.USAGE)


def _value(option: Any, given: FileValue) -> str | list[str]:
    """The value as the option takes it. Raises CommandFailed for a list where one is needed."""
    if option.multiple:
        return given.value if isinstance(given.value, list) else [given.value]
    if isinstance(given.value, list):
        raise CommandFailed(f"{given.place}: A list is not possible here.", ExitCode.USAGE)
    return given.value


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=use_settings_file,
        envvar=environment_variable("config"),
        help="YAML file of options by their names, such as `max-num-seqs: 128`.",
        show_default="none",
    ),
]
