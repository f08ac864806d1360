"""What operators are told about the servers of a database."""

from __future__ import annotations

from datetime import datetime

import msgspec


class ServerView(msgspec.Struct, frozen=True):
    """One installation that serves, or served, from this database."""

    id: str
    """The same after a restart."""
    name: str
    """Its host's."""
    version: str
    base_id: str
    """The base model that it serves."""
    started_at: datetime
    seen_at: datetime
    is_live: bool
    """It was seen within the last minute."""
