"""What the routes that are open to everybody answer."""

from __future__ import annotations

from typing import Literal

import msgspec


class Health(msgspec.Struct, frozen=True):
    """The server is as well as it was asked to be; if it is not, the answer is an error."""

    status: Literal["ok", "ready"]
