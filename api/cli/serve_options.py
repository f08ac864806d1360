"""The options of `loraplex serve` and `loraplex agent`, derived from the fields of EngineConfig
and Settings. Each is a flag, a variable and a key of the `--config` file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from ...engine.config import EngineConfig
from ...engine.errors import InvalidParameter
from ...engine.option import Option, options_of
from ...engine.proposer_list import DEFAULT_PROPOSERS
from ..contract.openapi_shapes import field_meanings
from ..settings import Origin, Settings, environment_variable, load_settings
from .exit_codes import CommandFailed, ExitCode
from .server_command import POSITIONAL_MODEL
from .setting_options import setting_option, typer_option
from .setting_sources import ConfigFile, origins_of
from .speculation import parse_speculation

ALL_SETTINGS = tuple(options_of(Settings))

Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
]


def with_options(
    command: Callable[..., None], settings: Collection[str] = ALL_SETTINGS
) -> Callable[..., None]:
    """The command as Typer takes it, with the class `ServerCommand`. `command` takes the two
    configurations by position and its context and further options by keyword. `settings`: those of
    which it has options."""
    own = list(_own_parameters(command))
    parameters = [
        _parameter(POSITIONAL_MODEL, None, Model),
        *_engine_parameters(),
        *own,
        *_setting_parameters(settings),
        _parameter("config", None, ConfigFile),
    ]

    @wraps(command)
    def run(**values: Any) -> None:
        own_values = {each.name: values[each.name] for each in own}
        origins = origins_of(values["context"])
        given = _in_fields(Settings, values, settings)
        engine_config = _engine_config(values, origins)
        command(engine_config, load_settings(origins=origins, **given), **own_values)

    vars(run)["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _own_parameters(command: Callable[..., None]) -> Iterator[Parameter]:
    hints = get_type_hints(command, include_extras=True)
    for each in signature(command).parameters.values():
        if each.kind is not Parameter.KEYWORD_ONLY:
            continue
        for mark in getattr(hints[each.name], "__metadata__", ()):
            if isinstance(mark, OptionInfo):
                mark.envvar = environment_variable(each.name)
        yield each.replace(annotation=hints[each.name])


def _engine_parameters() -> Iterator[Parameter]:
    hints = get_type_hints(EngineConfig, include_extras=True)
    meanings = field_meanings(EngineConfig)
    options = options_of(EngineConfig)
    for field in fields(EngineConfig):
        if field.name not in options:
            continue
        option = options[field.name]
        annotation, *marks = get_args(hints[field.name])
        kind = _kind(annotation, option)
        default = field.default
        if field.name == "speculation":
            default = list(DEFAULT_PROPOSERS)
        elif default is MISSING:
            default = None  # the model, which may be given without the option
        elif option.unit != 1 and default is not None:
            default = default / option.unit
        marked = typer_option(field.name, option, kind, marks, default, help=meanings[field.name])
        yield _parameter(field.name, default, Annotated[_optional(kind, default), marked])


def _setting_parameters(names: Collection[str]) -> Iterator[Parameter]:
    for name in names:
        kind = _kind(Settings.model_fields[name].annotation, options_of(Settings)[name])
        yield _parameter(name, None, Annotated[_optional(kind, None), setting_option(name, kind)])


def _optional(kind: Any, default: Any) -> Any:
    return kind | None if default is None else kind


def _parameter(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(annotation: Any, option: Option) -> Any:
    """The type of an option's value; a number of units may have a fraction."""
    if option.unit != 1:
        return float
    if get_origin(annotation) is tuple:
        return list[str]
    given = [part for part in get_args(annotation) if part is not NoneType]
    return given[0] if given else annotation


def _engine_config(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> EngineConfig:
    given = _in_fields(EngineConfig, values, options_of(EngineConfig))
    given["speculation"] = parse_speculation(values["speculation"])
    try:
        return EngineConfig(**given)
    except InvalidParameter as exc:
        problem = str(exc).removeprefix(f"{exc.param}: ")
        raise CommandFailed(f"{origins[exc.param].name} {problem}", ExitCode.USAGE) from exc


def _in_fields(config: type, values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The values of these options of the configuration in the units and types of its fields."""
    found = {name: values[name] for name in names}
    for name in names:
        option = options_of(config)[name]
        if option.unit != 1 and found[name] is not None:
            found[name] = round(found[name] * option.unit)
        elif isinstance(found[name], list):
            # A variable holds several as an option does, or separated by commas.
            found[name] = tuple(part for each in found[name] for part in each.split(",") if part)
    return found
