"""The command class of `loraplex serve` and `loraplex agent`: an option is a flag, a variable or a
key of the `--config` file, and MODEL may be given without `--model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ..settings import Origin, Source
from ..vllm_names import VALUES, explain_foreign_options, explain_option
from .exit_codes import CommandFailed, ExitCode
from .settings_file import FileValue, read_settings_file

POSITIONAL_MODEL = "model_argument"
_PLACES = "loraplex.settings_file"
_LINK = "tcp://"
"""Begins the value of a variable that Kubernetes sets for a Service."""
_SERVERS = ("serve", "agent")
"""They may share a file."""
_SOURCES: Mapping[str, Source] = {
    "COMMANDLINE": "flag",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "file",
}


class ServerCommand(TyperCommand):
    """Reads options from the command line, variables and a file."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Raises CommandFailed for options of vLLM that have no counterpart."""
        if explained := explain_foreign_options(args):
            raise CommandFailed(explained, ExitCode.USAGE)
        try:
            return super().make_context(info_name, args, *rest, **more)
        except typer.BadParameter as exc:
            _explain(exc)
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take MODEL for the value of `--model`. Raises CommandFailed unless there is one."""
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for completions and help
            return rest
        positional, model = ctx.params[POSITIONAL_MODEL], ctx.params["model"]
        source = ctx.get_parameter_source("model")
        if positional is not None:
            if model not in (None, positional) and source.name == "COMMANDLINE":
                raise CommandFailed(
                    f"Two models are given: {positional} and --model {model}.", ExitCode.USAGE
                )
            ctx.params["model"] = positional
            ctx.set_parameter_source("model", ctx.get_parameter_source(POSITIONAL_MODEL))
        elif model is None:
            raise CommandFailed(
                "Missing model. Give MODEL or --model: a folder, a .gguf file or a Hugging Face "
                "model ID (owner/name).",
                ExitCode.USAGE,
            )
        return rest


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


def origins_of(ctx: typer.Context) -> Mapping[str, Origin]:
    """Where each parameter of the command got its value."""
    return {
        str(option.name): _origin(ctx, option)
        for option in ctx.command.params
        if option.param_type_name == "option"
    }


def _origin(ctx: Any, option: Any) -> Origin:
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


def _explain(error: typer.BadParameter) -> None:
    """Name the option as the user wrote it, and say what to do instead of a value that only vLLM
    knows."""
    ctx, option = error.ctx, error.param
    if ctx is None or option is None or option.param_type_name != "option":
        return
    origin = _origin(ctx, option)
    error.param_hint = origin.name
    error.message = error.message.removeprefix("Value error, ")
    if origin.source == "environment" and str(option.resolve_envvar_value(ctx)).startswith(_LINK):
        error.message += (
            ". Kubernetes sets this variable for a Service named loraplex: set "
            "enableServiceLinks: false in the pod"
        )
    for value, remedy in VALUES.get(str(option.name), {}).items():
        if error.message.startswith(f"{value!r} is not"):
            error.message += f" {remedy}"
