"""What is answered about how a server is set up."""

from __future__ import annotations

from typing import Literal

import msgspec


class SettingView(msgspec.Struct, frozen=True):
    """One setting as it is in force."""

    name: str
    value: str | None
    """Null: nothing is set. Of a secret `set` or `not set`."""
    source: Literal["default", "environment", "file", "flag"]
    description: str
