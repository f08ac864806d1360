"""Response schemas of the routes that are open to every caller."""

from __future__ import annotations

from typing import Literal

import msgspec


class Health(msgspec.Struct, frozen=True):
    """The check succeeded; otherwise the response is an error."""

    status: Literal["ok", "ready"]
