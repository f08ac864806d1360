"""Declares commands with many options in groups, each a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer takes it: with the options of its parameters' classes in their place.

    Each of the command's parameters is a dataclass whose fields are options: `Annotated` as in a
    command's signature, with the default there.
    """
    groups = get_type_hints(command)
    del groups["return"]
    parameters = [parameter for group in groups.values() for parameter in _parameters(group)]

    @wraps(command)
    def run(**values: Any) -> None:
        command(
            **{
                name: group(**{field.name: values[field.name] for field in fields(group)})
                for name, group in groups.items()
            }
        )

    vars(run)["__signature__"] = Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
