"""Writing the audit log: in the transaction of the change, each entry chained to the one before.

The hash is keyed (HMAC-SHA256), so who can write to the database alone cannot make a chain that
verifies; the heads say where chains end, so a cut-off tail shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from ..base import utc_now
from ..keyring import Keyring
from ..sessions import PlatformSession, TenantSession
from .event import Event, Origin
from .models import (
    HASH_LENGTH,
    AuditColumns,
    AuditEntry,
    AuditHead,
    PlatformAuditEntry,
    PlatformAuditHead,
)

PLATFORM_CHAIN = "platform"
"""What the platform's own chain is called where a tenant's has its id."""
_NO_HASH = bytes(HASH_LENGTH)
_HEAD_ID = 1


class AuditLog:
    """Appends under the server's present secret; each entry names the one that it needs."""

    def __init__(self, keys: Keyring, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._keys = keys
        self._clock = clock

    def record(self, session: TenantSession, origin: Origin, event: Event) -> None:
        """Append to the chain of the session's tenant."""
        head = session.get(AuditHead, session.tenant_id, with_for_update=True)
        if head is None:
            head = AuditHead(number=0, hash=_NO_HASH)
            session.add(head)
        entry = AuditEntry(number=head.number + 1, **self._columns(origin, event, head.hash))
        entry.hash = self._keys.sign(_signed_text(session.tenant_id, entry.number, entry))
        session.add(entry)
        head.number, head.hash = entry.number, entry.hash
        session.flush()

    def record_platform(self, session: PlatformSession, origin: Origin, event: Event) -> None:
        """Append to the platform's own chain."""
        head = session.get(PlatformAuditHead, _HEAD_ID, with_for_update=True)
        if head is None:
            head = PlatformAuditHead(id=_HEAD_ID, number=0, hash=_NO_HASH)
            session.add(head)
        number = head.number + 1
        entry = PlatformAuditEntry(number=number, **self._columns(origin, event, head.hash))
        entry.hash = self._keys.sign(_signed_text(PLATFORM_CHAIN, number, entry))
        session.add(entry)
        head.number, head.hash = number, entry.hash
        session.flush()

    def hash_of(self, chain: str, number: int, entry: AuditColumns) -> bytes | None:
        """What the entry's `hash` must be; None if the server does not have the entry's secret."""
        return self._keys.mac(_signed_text(chain, number, entry), entry.secret_id)

    def _columns(self, origin: Origin, event: Event, previous_hash: bytes) -> dict[str, Any]:
        return {
            "at": self._clock(),
            "actor_kind": origin.actor.kind,
            "actor_id": origin.actor.id,
            "actor_name": origin.actor.name,
            "action": event.action,
            "resource": event.resource,
            "details": event.details,
            "request_id": origin.request_id,
            "address": origin.address,
            "previous_hash": previous_hash,
            "secret_id": self._keys.current_id,
        }


def _signed_text(chain: str, number: int, entry: AuditColumns) -> bytes:
    fields = [
        chain,
        number,
        entry.at.isoformat(),
        str(entry.actor_kind),
        entry.actor_id,
        entry.actor_name,
        entry.action,
        entry.resource,
        entry.details,
        entry.request_id,
        entry.address,
        entry.previous_hash.hex(),
    ]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return text.encode()
