"""Caches resolved adapter names: for seconds, or as long as the database is unavailable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ...platform.adapters.registry import AdapterRef, Meaning
from ...platform.errors import DatabaseUnavailable
from ..control_plane.last_seen import LastSeen

FRESH_SECONDS = 3.0
"""How long a resolved name is cached, the same as for keys."""


class Ticket(NamedTuple):
    """When a look-up began; taken before it."""

    last_changes: tuple[object, object]
    """The last that this server did before it to all tenants, and to this one."""
    at: float


class _Seen(NamedTuple):
    meaning: Meaning
    ticket: Ticket


class SeenAdapters:
    """By tenant and name, and by content."""

    def __init__(
        self, stale_seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._by_name = LastSeen[tuple[str, str], _Seen](stale_seconds, clock=clock)
        self._by_key = LastSeen[AdapterKey, AdapterRef](stale_seconds, clock=clock)
        self._last_changes: dict[str | None, object] = {}
        """By tenant; None is all tenants."""

    def note_change(self, tenant_id: str | None) -> None:
        """Something changed in the tenant, or in all: earlier look-ups are not fresh.

        Thread-safe.
        """
        self._last_changes[tenant_id] = object()

    def begin(self, tenant_id: str) -> Ticket:
        """Call before a name of the tenant is looked up."""
        return Ticket(self._changes_of(tenant_id), self._clock())

    def note(self, tenant_id: str, meaning: Meaning, ticket: Ticket) -> None:
        """Store the meaning of the tenant's name, as looked up."""
        self._by_name.note((tenant_id, meaning.name), _Seen(meaning, ticket))
        for version in meaning.versions:
            self._by_key.note(version.key, version)

    def forget(self, tenant_id: str, name: str) -> None:
        """The tenant's name was not found."""
        self._by_name.forget((tenant_id, name))

    def fresh(self, tenant_id: str, name: str) -> Meaning | None:
        """The name's meaning, if it was looked up recently and nothing has changed since."""
        seen = self._by_name.recall((tenant_id, name))
        if seen is None or self._clock() - seen.ticket.at > FRESH_SECONDS:
            return None
        is_unchanged = seen.ticket.last_changes == self._changes_of(tenant_id)
        return seen.meaning if is_unchanged else None

    def recall(self, tenant_id: str, name: str) -> Meaning:
        """The last meaning of the tenant's name. Raises DatabaseUnavailable if it is unknown."""
        seen = self._by_name.recall((tenant_id, name))
        if seen is None:
            raise DatabaseUnavailable
        return seen.meaning

    def recall_content(self, key: AdapterKey) -> AdapterRef:
        """The adapter last seen with this content. Raises DatabaseUnavailable if there is none."""
        seen = self._by_key.recall(key)
        if seen is None:
            raise DatabaseUnavailable
        return seen

    def _changes_of(self, tenant_id: str) -> tuple[object, object]:
        return self._last_changes.get(None), self._last_changes.get(tenant_id)
