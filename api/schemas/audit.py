"""What `/v1/audit` and `/admin/audit` answer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from .identity import ActorView


class AuditEntryView(msgspec.Struct, frozen=True):
    """One change."""

    number: int
    """In its chain, from 1 on without gaps."""
    at: datetime
    actor: ActorView
    action: str
    resource: str
    details: Mapping[str, Any]
    request_id: str | None
    address: str | None
    hash: str
    """Hexadecimal: keyed, over the entry and the hash of the one before."""


class BreachView(msgspec.Struct, frozen=True):
    """The first entry that is not as it was written."""

    number: int
    reason: str


class VerificationView(msgspec.Struct, frozen=True):
    """What a look at a chain found."""

    chain: str
    """`platform`, or a tenant's slug."""
    is_intact: bool
    """Nothing was found so far."""
    is_finished: bool
    """False: there are more entries; go on with `after` = `last_number`."""
    last_number: int
    """Up to this entry everything is in order."""
    breach: BreachView | None
