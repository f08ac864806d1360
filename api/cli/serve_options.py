"""The options of `loraplex serve` and `loraplex agent`, derived from the fields of EngineConfig
and Settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ...engine.config import EngineConfig
from ...engine.option import Option, options_of
from ..contract.openapi_shapes import field_meanings
from ..settings import Settings, load_settings
from .setting_options import setting_option, typer_option
from .speculation import parse_speculation

DEFAULT_SPECULATION = ["ngram"]
"""Unlike an engine without configuration, a server proposes tokens."""


ALL_SETTINGS = tuple(options_of(Settings))


def with_options(
    command: Callable[..., None], settings: Collection[str] = ALL_SETTINGS
) -> Callable[..., None]:
    """The command as Typer takes it. `command` takes the two configurations by position and has
    its further options by keyword. `settings`: those of which it has options."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name])
        for each in signature(command).parameters.values()
        if each.kind is Parameter.KEYWORD_ONLY
    ]
    parameters = [*_engine_parameters(), *own, *_setting_parameters(settings)]

    @wraps(command)
    def run(**values: Any) -> None:
        own_values = {each.name: values[each.name] for each in own}
        flags = _in_fields(Settings, values, settings)
        command(_engine_config(values), load_settings(**flags), **own_values)

    vars(run)["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


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
            default = DEFAULT_SPECULATION
        elif default is MISSING:
            default = Parameter.empty
        elif option.unit != 1 and default is not None:
            default = default / option.unit
        marked = typer_option(field.name, option, kind, marks, help=meanings[field.name])
        yield _parameter(field.name, kind, default, marked)


def _setting_parameters(names: Collection[str]) -> Iterator[Parameter]:
    for name in names:
        kind = _kind(Settings.model_fields[name].annotation, options_of(Settings)[name])
        yield _parameter(name, kind, None, setting_option(name, kind))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> Parameter:
    if default is None:
        kind = kind | None
    annotation: Any = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(annotation: Any, option: Option) -> Any:
    """The type of an option's value; a number of units may have a fraction."""
    if option.unit != 1:
        return float
    if get_origin(annotation) is tuple:
        return list[str]
    given = [part for part in get_args(annotation) if part is not NoneType]
    return given[0] if given else annotation


def _engine_config(values: Mapping[str, Any]) -> EngineConfig:
    given = _in_fields(EngineConfig, values, options_of(EngineConfig))
    return EngineConfig(**{**given, "speculation": parse_speculation(values["speculation"])})


def _in_fields(config: type, values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The values of these options of the configuration in the units and types of its fields."""
    found = {name: values[name] for name in names}
    for name in names:
        option = options_of(config)[name]
        if option.unit != 1 and found[name] is not None:
            found[name] = round(found[name] * option.unit)
        elif isinstance(found[name], list):
            found[name] = tuple(found[name])
    return found
