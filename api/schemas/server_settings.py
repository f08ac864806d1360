"""Response schemas of a server's settings."""

from __future__ import annotations

from typing import Literal

import msgspec


class SettingView(msgspec.Struct, frozen=True):
    """One setting with its effective value."""

    name: str
    value: str | None
    """Null: not set. For a secret, `set` or `not set`."""
    source: Literal["default", "environment", "file", "flag"]
    description: str
