"""The draft heads of adapters that are ready to run. Torch-free.

An adapter's head is loaded, moved and evicted with its other weights. To run, it is packed like the
base's, into one of a fixed number of slots.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...adapters.leases import Lease

if TYPE_CHECKING:
    from ...adapters.arena import Arena
    from .head_slot import HeadSlot
    from .packed_head import PackedHead

logger = logging.getLogger(__name__)

IDLE_CALLS = 256
"""A head makes room for another adapter's after so many drafts without it. Packing takes longer
than a draft, so adapters in turn must not push one another out."""


@dataclass(slots=True)
class _Ready:
    slot: HeadSlot
    used_at: int


class AdapterHeads:
    """Finds the head of a request's adapter."""

    def __init__(self, arena: Arena, slots: Iterable[HeadSlot]) -> None:
        """`slots`: empty ones, for the heads of adapters of this arena."""
        arena.on_remove.append(self.forget)
        self._arena = arena
        self._free = list(slots)
        self._ready: OrderedDict[int, _Ready] = OrderedDict()  # by row, oldest use first
        self._failed: set[int] = set()
        """The rows whose heads could not be packed. They are not tried again: a try takes long."""
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self._ready)

    def begin_call(self) -> None:
        """Another draft begins."""
        self._num_calls += 1

    def find(self, lease: Lease | None) -> PackedHead | None:
        """That of the leased adapter; None if it has none, it cannot be packed, or there is no
        room."""
        if lease is None or self._arena.published.get(lease.row) != (lease.key, lease.generation):
            return None
        ready = self._ready.get(lease.row) or self._prepare(lease.row)
        if ready is None:
            return None
        ready.used_at = self._num_calls
        self._ready.move_to_end(lease.row)
        return ready.slot.head

    def forget(self, row: int) -> None:
        """The row's adapter leaves the device."""
        self._failed.discard(row)
        if ready := self._ready.pop(row, None):
            ready.slot.erase()
            self._free.append(ready.slot)

    def _prepare(self, row: int) -> _Ready | None:
        values = self._arena.draft_head(row)
        if values is None or row in self._failed:
            return None
        if not self._free and not self._make_room():
            return None
        slot = self._free[-1]
        try:
            slot.fill(values)
        except Exception:  # such as too little memory; the drafts of other requests go on
            logger.exception("the draft head in row %d could not be packed", row)
            self._failed.add(row)
            slot.erase()
            return None
        ready = self._ready[row] = _Ready(self._free.pop(), 0)
        return ready

    def _make_room(self) -> bool:
        row, oldest = next(iter(self._ready.items()))
        if self._num_calls - oldest.used_at < IDLE_CALLS:
            return False
        self.forget(row)
        return True
