"""Writes the audit log in the transaction of the change; each entry is chained to the previous one.

The hash is keyed (HMAC-SHA256), so an attacker who can only write to the database cannot create a
chain that verifies. The heads record the ends of the chains, so a truncated chain is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from ..base import utc_now
from ..keyring import Keyring
from ..locked_rows import lock_or_add
from ..sessions import PlatformSession, TenantSession, UnitOfWork
from . import repository
from .event import Event, Origin
from .models import (
    HASH_LENGTH,
    AuditEntry,
    AuditHead,
    PlatformAuditEntry,
    PlatformAuditHead,
)
from .repository import PLATFORM_CHAIN
from .verification import Breach, ChainWalk, Verified, signed_text

__all__ = ["PLATFORM_CHAIN", "AuditLog"]

_NO_HASH = bytes(HASH_LENGTH)
_HEAD_ID = 1

Entry = TypeVar("Entry", AuditEntry, PlatformAuditEntry)


class AuditLog:
    """Appends under the server's present secret; each entry names the one that it needs."""

    def __init__(self, keys: Keyring, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._keys = keys
        self._clock = clock

    def record(self, session: TenantSession, origin: Origin, event: Event) -> None:
        """Append to the chain of the session's tenant."""
        tenant_id = session.tenant_id
        head = lock_or_add(session, AuditHead(tenant_id=tenant_id, number=0, hash=_NO_HASH))
        self._append(session, tenant_id, head, AuditEntry(tenant_id=tenant_id), origin, event)

    def record_platform(self, session: PlatformSession, origin: Origin, event: Event) -> None:
        """Append to the platform's own chain."""
        head = lock_or_add(session, PlatformAuditHead(id=_HEAD_ID, number=0, hash=_NO_HASH))
        self._append(session, PLATFORM_CHAIN, head, PlatformAuditEntry(), origin, event)

    def verify(
        self, session: PlatformSession, chain: str, *, after: int = 0, limit: int | None = None
    ) -> Verified:
        """Verify the chain (a tenant's id, or `PLATFORM_CHAIN`) after the number `after`.

        At most `limit` entries, so that a long chain can be verified in pieces: the next piece
        begins after the last verified number.
        """
        end = repository.find_end(session, chain)
        last = end.last_number or 0
        after = min(after, last)
        stop = last if limit is None else min(last, after + limit)
        walk = ChainWalk(self._keys, chain, after=after)
        breach = _walk_to(session, walk, stop)
        if breach is None and stop == last:
            breach = walk.compare(end)
        is_finished = breach is not None or stop == last
        return Verified(chain, walk.number, is_finished=is_finished, breach=breach)

    def _append(
        self,
        session: UnitOfWork,
        chain: str,
        head: AuditHead | PlatformAuditHead,
        entry: Entry,
        origin: Origin,
        event: Event,
    ) -> None:
        entry.number = head.number + 1
        entry.at = self._clock()
        entry.actor_kind = origin.actor.kind
        entry.actor_id = origin.actor.id
        entry.actor_name = origin.actor.name
        entry.action = event.action
        entry.resource = event.resource
        entry.details = event.details
        entry.request_id = origin.request_id
        entry.address = origin.address
        entry.previous_hash = head.hash
        entry.secret_id = self._keys.current_id
        entry.hash = self._keys.sign(signed_text(chain, entry))
        session.add(entry)
        head.number, head.hash = entry.number, entry.hash
        session.flush()


def _walk_to(session: PlatformSession, walk: ChainWalk, stop: int) -> Breach | None:
    try:
        for entry in repository.read_chain(session, walk.chain, first=walk.begin, last=stop):
            if (breach := walk.step(entry)) is not None:
                return breach
    except (ValueError, LookupError):  # of a whole batch: check entries one by one to find it
        return _walk_slowly(session, walk, stop)
    return walk.check_reached(stop)


def _walk_slowly(session: PlatformSession, walk: ChainWalk, stop: int) -> Breach | None:
    for number in range(walk.number + 1, stop + 1):
        try:
            entries = list(repository.read_chain(session, walk.chain, first=number, last=number))
        except (ValueError, LookupError):
            return Breach(number, "The entry cannot be read.")
        breach = walk.step(entries[0]) if entries else walk.check_reached(stop)
        if breach is not None:
            return breach
    return None
