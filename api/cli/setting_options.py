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
    name: str, option: Option, kind: Any, marks: Iterable[object], default: Any, help: str
) -> Any:
    """The option of a field. `kind` is the option's type, `marks` the field's annotations,
    `default` what applies without the option."""
    flag = option.flag(name)
    if option.has_negation:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return typer.Option(
        flag,
        *(f"--{alias}" for alias in option.aliases),
        envvar=environment_variable(option.key(name)),
        metavar=option.metavar,
        min=option.minimum,
        max=option.maximum,
        callback=check_finite if kind is float else None,
        show_default=unset_meaning(marks) or _in_words(default),
        help=help,
    )


def setting_option(name: str, kind: Any = str) -> Any:
    """The option of a setting."""
    field = Settings.model_fields[name]
    option = options_of(Settings)[name]
    return typer_option(
        name, option, kind, field.metadata, field.default, help=field.description or ""
    )


def _in_words(default: Any) -> str | bool:
    """What the help shows as the default; True: what Typer shows."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if isinstance(default, int | float | str) else True


DataDir = Annotated[Path | None, setting_option("data_dir")]
DatabaseUrl = Annotated[str | None, setting_option("database")]
StoreUrl = Annotated[str | None, setting_option("store")]
Tuning = Annotated[bool | None, setting_option("tuning", bool)]
TuningDevice = Annotated[str | None, setting_option("tuning_device")]
