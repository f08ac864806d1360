"""Claims: windows of the arena that are being cleared, each reserved for one adapter."""

from __future__ import annotations

from .extents import Extent
from .identity import AdapterKey


class Claims:
    """At most one claim at a time waits for leases to end; windows never overlap."""

    def __init__(self) -> None:
        self._windows: dict[AdapterKey, Extent] = {}
        self._draining: AdapterKey | None = None
        """The adapter whose claim waits for leases to end."""
        self.withheld: list[Extent] = []
        """The end of the arena, while it is cleared to be taken away."""

    def __contains__(self, key: AdapterKey) -> bool:
        """Whether room is being made for this adapter."""
        return key in self._windows

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    def get(self, key: AdapterKey) -> Extent | None:
        return self._windows.get(key)

    def add(self, key: AdapterKey, window: Extent) -> None:
        assert not any(window.overlaps(other) for other in self.of_others(key))
        self._windows[key] = window

    def drain(self, key: AdapterKey, window: Extent) -> None:
        """Claim a window in which leased adapters lie: each goes when its last lease ends."""
        assert self._draining is None, "one at a time"
        self.add(key, window)
        self._draining = key

    def drop(self, key: AdapterKey) -> None:
        self._windows.pop(key, None)
        if self._draining == key:
            self._draining = None

    def withhold(self, window: Extent) -> None:
        """Keep adapters out of this end of the arena. Claims that overlap it are dropped."""
        self.withheld[:] = [window]
        for key in [key for key, other in self._windows.items() if window.overlaps(other)]:
            self.drop(key)

    def is_drained_for(self, key: AdapterKey) -> bool:
        return self._draining == key

    def of_others(self, key: AdapterKey) -> list[Extent]:
        windows = [window for claimant, window in self._windows.items() if claimant != key]
        return windows + self.withheld

    def cover(self, extent: Extent) -> bool:
        """Whether an extent lies in a window."""
        return any(extent.overlaps(window) for window in (*self._windows.values(), *self.withheld))
