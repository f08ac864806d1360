"""Generates `docs/settings.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .settings import Settings

_INTRODUCTION = """\
# Settings

What an operator may set in the environment of `loraplex serve`, and of the commands that work on
the database. An option of the command goes before; what is not set has its default.

| variable | type | default | meaning |
|---|---|---|---|
"""
_CLOSING = """
The store's credentials are boto3's own: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and what else
it reads. The exporter of spans is set up by OpenTelemetry's `OTEL_...`. What the engine is given
(memory, batches, speculation) are options of [`loraplex serve`](cli.md#loraplex-serve).

This page is printed by `python -m loraplex.api.settings_reference`.
"""
_TYPE_NAMES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "SecretStr": "secret",
}


def settings_reference() -> str:
    """Every setting by its environment variable."""
    return _INTRODUCTION + "".join(_rows()) + _CLOSING


def _rows() -> Iterator[str]:
    prefix = Settings.model_config["env_prefix"]
    for name, field in Settings.model_fields.items():
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        variable = f"{prefix}{name.upper()}"
        yield f"| `{variable}` | {_type_name(field.annotation)} | {_default(field)} | {meaning} |\n"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(
            _type_name(part) for part in get_args(annotation) if part is not NoneType
        )
    if get_origin(annotation) is tuple:
        return "list, separated by commas"
    members = getattr(annotation, "__members__", None)
    if members is not None:
        return ", ".join(f"`{member.value}`" for member in members.values())
    name = getattr(annotation, "__name__", str(annotation))
    return _TYPE_NAMES.get(name, name)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None or field.default in (None, ()):
        return ""
    return f"`{field.default}`"


if __name__ == "__main__":
    sys.stdout.write(settings_reference())
