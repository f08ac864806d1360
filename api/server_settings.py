"""A server's effective settings and their sources.

An option of `loraplex serve` sets a field of the engine's configuration or of the settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import urlsplit

from pydantic import SecretStr

from ..engine.config import EngineConfig
from ..engine.option import options_of, unset_meaning
from ..platform.database import database_name
from .contract.openapi_shapes import field_meanings
from .settings import Origin, Settings, Source, environment_variable

_FILES = {
    "secret": "secret",
    "secret_previous": "secret.previous",
    "oidc_client_secret": "oidc.secret",
}
"""Settings read from files in the data folder if no variable is set."""


class Setting(NamedTuple):
    """One effective setting."""

    name: str
    value: str | None
    source: Source
    origin: str | None
    """As the user wrote it: the flag, the variable, or the place in a file."""
    flag: str | None
    variable: str | None
    description: str
    unset: str | None
    """What applies while it has no value."""


def list_settings_in_force(settings: Settings, engine_config: EngineConfig) -> list[Setting]:
    """Every setting of the platform and of the engine; of secrets only whether they are set."""
    return [*_platform(settings), *_engine(settings, engine_config)]


def _platform(settings: Settings) -> Iterator[Setting]:
    for name, field in Settings.model_fields.items():
        value, variable = getattr(settings, name), environment_variable(name)
        origin = Origin("default", "")
        if name in settings.origins:
            origin = settings.origins[name]
        elif name in settings.model_fields_set:
            origin = Origin("environment", variable)
        elif name in _FILES and (file := settings.data_dir / _FILES[name]).exists():
            value, origin = SecretStr("in the file"), Origin("file", str(file))
        yield _setting(
            variable,
            _shown(name, value),
            origin,
            flag=_flag(Settings, name),
            variable=variable,
            description=field.description or "",
            marks=field.metadata,
        )


def _engine(settings: Settings, config: EngineConfig) -> Iterator[Setting]:
    meanings = field_meanings(EngineConfig)
    hints = get_type_hints(EngineConfig, include_extras=True)
    for field in dataclasses.fields(EngineConfig):
        flag = _flag(EngineConfig, field.name)
        yield _setting(
            f"engine.{field.name}",
            _shown(field.name, getattr(config, field.name)),
            settings.origins.get(field.name, Origin("default", "")),
            flag=flag,
            variable=environment_variable(flag.removeprefix("--")) if flag else None,
            description=meanings[field.name],
            marks=getattr(hints[field.name], "__metadata__", ()),
        )


def _setting(
    name: str,
    value: str | None,
    origin: Origin,
    *,
    flag: str | None,
    variable: str | None,
    description: str,
    marks: Iterable[object],
) -> Setting:
    where = None if origin.source == "default" else origin.name
    meaning, unset = " ".join(description.split()), unset_meaning(marks)
    return Setting(name, value, origin.source, where, flag, variable, meaning, unset)


def _flag(config: type, field: str) -> str | None:
    option = options_of(config).get(field)
    return option.flag(field) if option else None


def _shown(name: str, value: Any) -> str | None:
    match value:
        case None:
            return "not set" if name in _FILES else None
        case SecretStr():
            return "set"
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case tuple():
            return ", ".join(map(str, value)) or None
    return _without_password(name, str(value))


def _without_password(name: str, text: str) -> str:
    if name == "database":
        return database_name(text)
    parts = urlsplit(text) if "://" in text else None
    if parts is None or "@" not in parts.netloc:
        return text
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
