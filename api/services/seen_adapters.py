"""Which adapters names meant lately, for the time in which the database cannot be asked."""

from __future__ import annotations

from ...adapters.identity import AdapterKey
from ...platform.adapters.registry import AdapterRef
from ...platform.errors import DatabaseUnavailable
from ..last_seen import LastSeen


class SeenAdapters:
    """By tenant and name, and by content."""

    def __init__(self, stale_seconds: float) -> None:
        self._by_name = LastSeen[tuple[str, str], AdapterRef](stale_seconds)
        self._by_key = LastSeen[AdapterKey, AdapterRef](stale_seconds)

    def note(self, tenant_id: str, name: str, adapter: AdapterRef) -> None:
        """The tenant's name has just meant this."""
        self._by_name.note((tenant_id, name), adapter)
        self._by_key.note(adapter.key, adapter)

    def forget(self, tenant_id: str, name: str) -> None:
        """The tenant's name has just meant nothing."""
        self._by_name.forget((tenant_id, name))

    def recall(self, tenant_id: str, name: str) -> AdapterRef:
        """What the tenant's name meant last. Raises DatabaseUnavailable if that is unknown."""
        seen = self._by_name.recall((tenant_id, name))
        if seen is None:
            raise DatabaseUnavailable
        return seen

    def recall_content(self, key: AdapterKey) -> AdapterRef:
        """The adapter last seen with this content. Raises DatabaseUnavailable if there is none."""
        seen = self._by_key.recall(key)
        if seen is None:
            raise DatabaseUnavailable
        return seen
