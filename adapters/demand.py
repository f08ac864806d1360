"""Which adapters are needed, and how soon: pins first, then the turns of what requests wait for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .identity import AdapterKey
from .next_use import NextUseRank, NextUses
from .pins import Pins
from .record import Record


class Demand:
    """The pins, the turns, and the order that follows from them."""

    def __init__(self, capacity: int, num_soon: int, clock: Callable[[], float]) -> None:
        """`capacity` of the arena, in elements; of `num_soon` adapters the turn is soon."""
        self.pins = Pins(capacity)
        self.turns = NextUses(num_soon, clock)

    def reach(self, key: AdapterKey) -> int:
        """What is at a greater distance than this may be displaced for the adapter."""
        return -1 if key in self.pins else self.turns.reach(key)

    def rank(self, record: Record[Any]) -> NextUseRank:
        """Pins first, then what is needed soon, by its turn; all others as they were asked for."""
        return self.reach(record.key), record.order

    def missed_since(self, record: Record[Any]) -> float:
        """An adapter is not missed while other adapters have earlier turns."""
        if not self.turns:
            return record.entered_at
        soon_since = self.turns.soon_since(record.key)
        return math.inf if soon_since is None else max(record.entered_at, soon_since)
