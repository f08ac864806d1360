"""The adapters that a new engine process loads."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ..messages import EngineStats, Prefetch, SetPinned
from .quarantine import Quarantine
from .supervisor import Supervisor

WARM_UP_SECONDS = 10.0
"""A process that ran for less time may not have loaded all adapters of the process before it."""


class KeptAdapters:
    """The pinned adapters, and those that were resident when the last process died.

    Adapters in quarantine are not sent to an engine.
    """

    def __init__(self, supervisor: Supervisor, quarantine: Quarantine) -> None:
        self._supervisor = supervisor
        self._quarantine = quarantine
        self._pinned: list[AdapterKey] = []
        """The most important first; see `SetPinned`."""
        self._residents: list[AdapterKey] = []
        """Most recently used first."""

    def set_pinned(self, keys: Sequence[AdapterKey]) -> None:
        """Pin exactly these adapters, the most important first."""
        self._pinned = list(dict.fromkeys(keys))
        if self._supervisor.is_ready:
            self._send_pinned()

    def unpin(self, key: AdapterKey) -> None:
        """Unpin this adapter in later processes."""
        self._pinned = [pinned for pinned in self._pinned if pinned != key]

    def note_residents(self, stats: EngineStats) -> None:
        """Note the resident adapters of a snapshot.

        A new process loads the most recently used first, so its own order is the reverse until
        requests have come: until then the order of the process before it stays.
        """
        keys = [entry.key for entry in stats.adapters if entry.tier is Tier.DEVICE]
        if self._supervisor.ready_seconds < WARM_UP_SECONDS:
            known = set(self._residents)
            keys = [*(key for key in keys if key not in known), *self._residents]
        self._residents = keys

    def forget_resident(self, key: AdapterKey) -> None:
        """The adapter was deleted: later processes load neither it nor its compositions."""
        self._residents = [each for each in self._residents if not each.has_part(key)]

    def bring_back(self) -> None:
        """Send them to a process that has just become ready."""
        if self._pinned:
            self._send_pinned()
        for key in self._residents:
            if not self._quarantine.holds(key):
                self._supervisor.send(Prefetch(key))

    def _send_pinned(self) -> None:
        keys = [key for key in self._pinned if not self._quarantine.holds(key)]
        self._supervisor.send(SetPinned(keys))
