"""The adapters that every engine process is to hold."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ..messages import EngineStats, Prefetch, SetPinned
from .quarantine import Quarantine
from .supervisor import Supervisor

WARM_UP_SECONDS = 10.0
"""A shorter life may not have brought back the adapters that were resident before it."""


class KeptAdapters:
    """Pinned adapters, and those that were resident when the last process died.

    Of these an engine is told nothing while they are in quarantine.
    """

    def __init__(self, supervisor: Supervisor, quarantine: Quarantine) -> None:
        self._supervisor = supervisor
        self._quarantine = quarantine
        self._pinned: list[AdapterKey] = []
        """Most wanted first; see `SetPinned`."""
        self._residents: list[AdapterKey] = []
        """Most recently used first."""

    def set_pinned(self, keys: Sequence[AdapterKey]) -> None:
        """Pin exactly these, most wanted first."""
        self._pinned = list(dict.fromkeys(keys))
        if self._supervisor.is_ready:
            self._send_pinned()

    def unpin(self, key: AdapterKey) -> None:
        """Pin this one in no later process."""
        self._pinned = [pinned for pinned in self._pinned if pinned != key]

    def note_residents(self, stats: EngineStats) -> None:
        """The engine holds what the snapshot says."""
        keys = [entry.key for entry in stats.adapters if entry.tier is Tier.DEVICE]
        if self._supervisor.ready_seconds < WARM_UP_SECONDS:
            keys = list(dict.fromkeys([*keys, *self._residents]))
        self._residents = keys

    def forget_resident(self, key: AdapterKey) -> None:
        """The adapter was deleted: it does not come back."""
        if key in self._residents:
            self._residents.remove(key)

    def bring_back(self) -> None:
        """Tell a process that has just become ready."""
        if self._pinned:
            self._send_pinned()
        for key in self._residents:
            if not self._quarantine.holds(key):
                self._supervisor.send(Prefetch(key))

    def _send_pinned(self) -> None:
        keys = [key for key in self._pinned if not self._quarantine.holds(key)]
        self._supervisor.send(SetPinned(keys))
