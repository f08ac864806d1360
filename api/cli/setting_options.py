"""Options that settings and the engine's configuration declare, as Typer takes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ...engine.option import Option, options_of, unset_meaning
from ..settings import Settings, environment_variable
from .numbers import check_finite


def typer_option(
    name: str, option: Option, kind: Any, marks: Iterable[object], **described: Any
) -> Any:
    """The option of a field. `kind` is the option's type, `marks` the field's annotations."""
    flag = option.flag(name)
    if option.has_negation:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return typer.Option(
        flag,
        metavar=option.metavar,
        min=option.minimum,
        max=option.maximum,
        callback=check_finite if kind is float else None,
        show_default=unset_meaning(marks) or True,
        **described,
    )


def setting_option(name: str, kind: Any = str) -> Any:
    """The option of a setting, which its variable sets as well."""
    field = Settings.model_fields[name]
    option = options_of(Settings)[name]
    return typer_option(
        name,
        option,
        kind,
        field.metadata,
        # A variable is read in the setting's unit, not in the option's.
        envvar=environment_variable(name) if option.unit == 1 else None,
        help=field.description,
    )


DataDir = Annotated[Path | None, setting_option("data_dir")]
DatabaseUrl = Annotated[str | None, setting_option("database")]
StoreUrl = Annotated[str | None, setting_option("store")]
