"""Caches principals by key for a few seconds, so most requests need no query for their key.

Changes by other servers take effect after `TTL_SECONDS`, changes by this server immediately
(`clear`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from ...platform.base import utc_now
from ...platform.keys.principal import AnyPrincipal, Principal

TTL_SECONDS = 3.0
"""A revocation must take effect within 5 s on every server, including the look-up itself."""
MAX_STALE_SECONDS = 300.0
"""The default maximum age of an entry that is used while the database is unavailable."""
MAX_ENTRIES = 20_000


class _Entry(NamedTuple):
    principal: AnyPrincipal
    looked_up_at: float


class AuthCache:
    """Principals by the SHA-256 of key and tenant. Safe to share between threads."""

    def __init__(
        self,
        *,
        max_entries: int = MAX_ENTRIES,
        stale_seconds: float = MAX_STALE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = max_entries
        self._stale_seconds = stale_seconds
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_changes = 0
        self._lock = threading.Lock()

    def get(
        self, token: str, tenant_slug: str | None, *, allow_stale: bool = False
    ) -> AnyPrincipal | None:
        """The principal of the key at the last look-up; None if that is too long ago.

        `allow_stale` is for when the database is unavailable. The caller checks the key's expiry.
        """
        max_age = self._stale_seconds if allow_stale else TTL_SECONDS
        with self._lock:
            entry = self._entries.get(_digest(token, tenant_slug))
        if entry is None or self._clock() - entry.looked_up_at > max_age:
            return None
        return entry.principal

    def begin(self) -> Ticket:
        """Call before a look-up: a change after this invalidates its result."""
        with self._lock:
            return Ticket(self._num_changes, self._clock())

    def put(
        self, token: str, tenant_slug: str | None, principal: AnyPrincipal, ticket: Ticket
    ) -> None:
        """Cache the result of a look-up, unless something changed while it ran."""
        digest = _digest(token, tenant_slug)
        with self._lock:
            if ticket.num_changes != self._num_changes:
                return
            self._entries[digest] = _Entry(principal, ticket.began_at)
            self._entries.move_to_end(digest)
            while len(self._entries) > self._max_entries or self._is_oldest_stale():
                self._entries.popitem(last=False)

    def drop(self, token: str, tenant_slug: str | None) -> None:
        """Drop a key that was refused."""
        with self._lock:
            self._entries.pop(_digest(token, tenant_slug), None)

    def clear(self) -> None:
        """Drop everything, because tenants or operators changed."""
        with self._lock:
            self._num_changes += 1
            self._entries.clear()

    def clear_tenant(self, tenant_id: str) -> None:
        """Drop the principals of the tenant, because its keys or users changed.

        The entries of other tenants stay: a tenant that changes much must not cost them a look-up
        per request, or their entries while the database is unavailable.
        """
        with self._lock:
            self._num_changes += 1
            concerned = [
                digest
                for digest, entry in self._entries.items()
                if isinstance(entry.principal, Principal) and entry.principal.tenant_id == tenant_id
            ]
            for digest in concerned:
                del self._entries[digest]

    def __len__(self) -> int:
        return len(self._entries)

    def _is_oldest_stale(self) -> bool:
        oldest = next(iter(self._entries.values()), None)
        max_age = max(TTL_SECONDS, self._stale_seconds)
        return oldest is not None and self._clock() - oldest.looked_up_at > max_age


class Ticket(NamedTuple):
    """When the look-up began."""

    num_changes: int
    began_at: float


def is_current(principal: AnyPrincipal) -> bool:
    """Whether the key is still valid."""
    return principal.expires_at is None or utc_now() < principal.expires_at


def _digest(token: str, tenant_slug: str | None) -> bytes:
    # No key and no slug holds a NUL: headers do not.
    return hashlib.sha256(f"{token}\0{tenant_slug or ''}".encode()).digest()
