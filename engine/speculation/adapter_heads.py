"""The draft heads of adapters that are packed to run. Torch-free.

An adapter's head is loaded, moved and evicted with its other weights. To run, it is packed like the
base's, which takes memory of its own; there is room for a fixed number of packed heads.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...adapters.leases import Lease

if TYPE_CHECKING:
    from torch import Tensor

    from ...adapters.arena import Arena
    from .packed_head import PackedHead

logger = logging.getLogger(__name__)

IDLE_CALLS = 256
"""A packed head makes room for another adapter's after so many drafts without it. Packing takes
longer than a draft, so adapters in turn must not push one another out."""


@dataclass(slots=True)
class _Ready:
    head: PackedHead
    used_at: int


class AdapterHeads:
    """Finds the head of a request's adapter."""

    def __init__(self, arena: Arena, pack: Callable[[Tensor], PackedHead], room: int) -> None:
        """`pack`: makes a head of its `[values]`. `room`: the number of heads."""
        arena.on_remove.append(self.forget)
        self._arena = arena
        self._pack = pack
        self._room = room
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
        return ready.head

    def forget(self, row: int) -> None:
        """The row's adapter leaves the device."""
        self._failed.discard(row)
        if ready := self._ready.pop(row, None):
            ready.head.erase()

    def _prepare(self, row: int) -> _Ready | None:
        values = self._arena.draft_head(row)
        if values is None or row in self._failed:
            return None
        if len(self._ready) == self._room and not self._make_room():
            return None
        try:
            ready = self._ready[row] = _Ready(self._pack(values), 0)
        except Exception:  # such as too little memory; the drafts of other requests go on
            logger.exception("the draft head in row %d could not be packed", row)
            self._failed.add(row)
            return None
        return ready

    def _make_room(self) -> bool:
        row, oldest = next(iter(self._ready.items()))
        if self._num_calls - oldest.used_at < IDLE_CALLS:
            return False
        self.forget(row)
        return True
