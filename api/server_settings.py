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
from ..engine.option import unset_meaning
from ..platform.database import database_name
from .contract.openapi_shapes import field_meanings
from .settings import Settings, Source, environment_variable

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
    description: str


def list_settings_in_force(settings: Settings, engine_config: EngineConfig) -> list[Setting]:
    """Every setting of the platform and of the engine; of secrets only whether they are set."""
    return [*_platform(settings), *_engine(settings, engine_config)]


def _platform(settings: Settings) -> Iterator[Setting]:
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        source: Source = "default"
        if name in settings.origins:
            source = settings.origins[name].source
        elif name in settings.model_fields_set:
            source = "environment"
        elif name in _FILES and (settings.data_dir / _FILES[name]).exists():
            value, source = SecretStr("in the file"), "file"
        meaning = _meaning(field.description or "", field.metadata)
        yield Setting(environment_variable(name), _shown(name, value), source, meaning)


def _engine(settings: Settings, config: EngineConfig) -> Iterator[Setting]:
    meanings = field_meanings(EngineConfig)
    hints = get_type_hints(EngineConfig, include_extras=True)
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        source: Source = "default"
        if field.name in settings.origins:
            source = settings.origins[field.name].source
        marks = getattr(hints[field.name], "__metadata__", ())
        meaning = _meaning(meanings[field.name], marks)
        yield Setting(f"engine.{field.name}", _shown(field.name, value), source, meaning)


def _meaning(description: str, marks: Iterable[object]) -> str:
    unset = unset_meaning(marks)
    default = f" Default: {unset}." if unset else ""
    return " ".join(description.split()) + default


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
