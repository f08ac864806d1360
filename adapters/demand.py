"""Which adapters are needed, and how soon: pins first, then by their next use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .identity import AdapterKey
from .next_use import NextUseRank, NextUses
from .pins import Pins
from .record import Record


class Demand:
    """The pins, the next uses, and the order that follows from them."""

    def __init__(self, capacity: int, num_soon: int, clock: Callable[[], float]) -> None:
        """`capacity` of the arena, in elements; `num_soon`: see `NextUses`."""
        self.pins = Pins(capacity)
        self.next_uses = NextUses(num_soon, clock)

    def eviction_distance(self, key: AdapterKey) -> int:
        """Adapters at a greater distance than this may be evicted for the adapter."""
        return -1 if key in self.pins else self.next_uses.eviction_distance(key)

    def rank(self, record: Record[Any]) -> NextUseRank:
        """Pins first, then adapters that are needed soon, then the others as requested."""
        return self.eviction_distance(record.key), record.order

    def missed_since(self, record: Record[Any]) -> float:
        """Since when requests have missed it; infinity while its next use is not soon."""
        if not self.next_uses:
            return record.entered_at
        soon_since = self.next_uses.soon_since(record.key)
        return math.inf if soon_since is None else max(record.entered_at, soon_since)
