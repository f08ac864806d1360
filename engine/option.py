"""Fields of a configuration that are also options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from .errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Option:
    """Annotates a field that an option sets. The field declares the name, type, default and
    meaning."""

    name: str | None = None
    """The option's name; None: the field's."""
    metavar: str | None = None
    """What stands for the value in the help; None: the type's name."""
    unit: int = 1
    """The field's value is the option's value times this."""
    minimum: float | None = None
    """The smallest value of the option; in a field without a unit, also of the field."""
    maximum: float | None = None
    has_negation: bool = False
    """There is an option with `no-` before the name, which sets False."""
    aliases: tuple[str, ...] = ()
    """Further keys: the names of vLLM's options with this meaning."""

    def key(self, field: str) -> str:
        """The option in a settings file."""
        return (self.name or field).replace("_", "-")

    def flag(self, field: str) -> str:
        """The option as it is written on the command line."""
        return f"--{self.key(field)}"

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidParameter for a value outside the limits."""
        if self.unit != 1 or value is None:
            return
        if self.minimum is not None and not value >= self.minimum:
            raise InvalidParameter(field, f"must be at least {self.minimum}")
        if self.maximum is not None and not value <= self.maximum:
            raise InvalidParameter(field, f"must be at most {self.maximum}")


@dataclass(frozen=True, slots=True)
class Unset:
    """Annotates a field: what applies while it has no value."""

    meaning: str


def unset_meaning(marks: Iterable[object]) -> str | None:
    """What applies while a field with these annotations has no value."""
    return next((mark.meaning for mark in marks if isinstance(mark, Unset)), None)


@cache
def options_of(config: type) -> Mapping[str, Option]:
    """The fields of a class that are options."""
    annotations = get_type_hints(config, include_extras=True)
    return {
        field: mark
        for field, annotation in annotations.items()
        for mark in getattr(annotation, "__metadata__", ())
        if isinstance(mark, Option)
    }
