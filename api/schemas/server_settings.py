"""Response schemas of a server's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class SettingView(AnswerModel):
    """One setting with its effective value."""

    name: str
    value: str | None
    """Null: not set. For a secret, `set` or `not set`."""
    source: Literal["default", "environment", "file", "flag"]
    origin: str | None
    """The flag, the variable, or the place in a file that gives the value; null: the default."""
    flag: str | None
    """The option of `loraplex serve` that sets it."""
    variable: str | None
    """The environment variable that sets it."""
    description: str
    unset: str | None
    """What applies while it is not set."""
