"""The adapters that the engine knows, from what its snapshots say of them."""

from __future__ import annotations

from dataclasses import replace

from ...adapters.identity import AdapterKey
from ...adapters.status import AdapterStatus
from ..messages import EngineStats


class KnownAdapters:
    """The last status of every adapter of one engine process."""

    def __init__(self) -> None:
        self._statuses: dict[AdapterKey, AdapterStatus] = {}
        """The last changed at the end."""

    def complete(self, stats: EngineStats) -> EngineStats:
        """Take the changes of a snapshot; return it with the status of every adapter.

        Leased adapters come first, otherwise those that changed last.
        """
        statuses = self._statuses
        for key in stats.gone_adapters:
            statuses.pop(key, None)
        for status in reversed(stats.adapters):
            statuses.pop(status.key, None)
            statuses[status.key] = status
        leased = [status for status in reversed(statuses.values()) if status.num_leases]
        idle = [status for status in reversed(statuses.values()) if not status.num_leases]
        return replace(stats, adapters=leased + idle, gone_adapters=[])
