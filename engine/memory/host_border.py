"""Moves host memory between adapters and KV blocks, as `Budget` decides.

Both are in one memory: adapters from its beginning on, the slots of KV blocks up to its end. One
side gives before the other gets. Slots give up the places next to the border, once their content
has moved to other places; adapters give up their end, which a loader thread clears. Torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...adapters.manager import AdapterManager
from ..kv.blocks import KvBlocks
from ..scheduling.step_costs import StepCosts
from .border import PATIENCE_SECONDS
from .budget import INTERVAL_SECONDS, Budget
from .host_plan import SharedHostMemory

logger = logging.getLogger(__name__)

HALF_LIFE_SECONDS = 10.0
"""Of a loss's weight: the host's memory is filled more slowly than the device's, so what a move
costs comes later."""
MOST_BYTES_PER_STEP = 32 << 20
"""Slots that give up their places at once: the step's requests wait for the copies."""


class HostBorder:
    """The border between adapters and the KV blocks of one group in one engine's host memory."""

    def __init__(
        self,
        memory: SharedHostMemory,
        *,
        adapter_bytes: int,
        kv: KvBlocks,
        block_size: int,
        manager: AdapterManager[Any],
        costs: StepCosts,
        clock: Callable[[], float],
    ) -> None:
        """`adapter_bytes`: what adapters have at the start. No slot was used so far, and those that
        the memory of the adapters leaves no place for are taken out of use."""
        self._group = kv.groups[memory.group]
        self._kv, self._block_size = kv, block_size
        self._manager, self._costs, self._clock = manager, costs, clock
        self._bounds, self._slot_bytes = memory.bounds, memory.slot_bytes
        self._budget = Budget(
            memory.bounds, adapter_bytes, clock(), half_life_seconds=HALF_LIFE_SECONDS
        )
        self._resizing: Future[bool] | None = None
        """Of the adapters' part, in a loader thread."""
        self._begun_at = self._polled_at = clock()
        self._room_seconds = 0.0
        """Time in which adapters waited for host memory, since the last decision."""
        self._reread_seconds = 0.0
        self._num_lost_tokens = 0
        self.num_moves = 0
        """Steps by which the border has moved."""
        self._group.host.ghosts.depth = self._bounds.reach // self._slot_bytes
        manager.remember_evicted_on_host(self._bounds.reach)
        # The first slots have the first places, which nothing was written to.
        self._group.host.withdraw(self._num_slots - self._num_slots_beside(adapter_bytes))

    def poll(self) -> None:
        """Hand over what has come free, and decide when it is time."""
        now = self._clock()
        self._note_waiting(now)
        if self._is_resizing():
            return
        if self._is_moving:
            if now - self._begun_at >= PATIENCE_SECONDS:
                self._budget.adapter_bytes = self._manager.host_bytes
                self._resize(self._manager.host_bytes)
            else:
                self._hand_over()
        else:
            self._restore()
            if self._budget.is_due(now):
                self._decide(now)

    @property
    def _is_moving(self) -> bool:
        return self._budget.adapter_bytes != self._manager.host_bytes

    @property
    def _num_slots(self) -> int:
        return self._group.host.num_slots

    def _num_slots_beside(self, adapter_bytes: int) -> int:
        """How many slots there is room for if adapters have so many bytes."""
        return (self._bounds.total - adapter_bytes) // self._slot_bytes

    def _is_resizing(self) -> bool:
        """Whether a loader thread is at work; else note what it has achieved."""
        if self._resizing is not None and self._resizing.done():
            if error := self._resizing.exception():  # it is tried again
                logger.warning("host_memory_not_resized", exc_info=error)
            self._resizing = None
            self._manager.note_host_room()
        return self._resizing is not None

    def _resize(self, adapter_bytes: int) -> None:
        self._resizing = self._manager.resize_host(adapter_bytes)

    def _hand_over(self) -> None:
        """Take from the side that should have less, or give the other one what is free."""
        wanted = self._budget.adapter_bytes
        excess = self._num_slots - self._num_slots_beside(wanted)
        if wanted <= self._manager.host_bytes:
            self._resize(wanted)
        elif excess > 0:
            self._group.withdraw_slots(min(excess, self._num_to_spare))
        elif self._are_given_up:
            self._resize(wanted)

    @property
    def _num_to_spare(self) -> int:
        """Slots that may give up their places now: none while a thread reads into some."""
        if self._group.host.filling:
            return 0
        most = max(MOST_BYTES_PER_STEP // self._slot_bytes, 1)
        return min(self._group.host.num_free, most)

    @property
    def _are_given_up(self) -> bool:
        """Whether nothing is copied to or from the places that slots gave up: the operations of
        earlier steps have been executed."""
        return self._kv.operations.is_empty

    def _restore(self) -> None:
        """Give the slots what adapters do not have."""
        host = self._group.host
        num_more = self._num_slots_beside(self._manager.host_bytes) - self._num_slots
        host.restore(min(num_more, host.num_withdrawn))

    def _decide(self, now: float) -> None:
        before = self._budget.adapter_bytes
        wanted = self._budget.decide(
            self._adapter_loss(), self._kv_loss(), now, needed=self._manager.awaited_host_bytes
        )
        if wanted != before:
            self.num_moves += 1
            self._begun_at = now

    def _note_waiting(self, now: float) -> None:
        # Longer than a decision's interval nobody polls but an engine without requests.
        elapsed, self._polled_at = min(now - self._polled_at, INTERVAL_SECONDS), now
        if self._manager.awaited_host_bytes:
            self._room_seconds += elapsed

    def _adapter_loss(self) -> float:
        """Seconds since the last call that `reach` more bytes would have spared adapters: reading
        again what was evicted, and that part of the waiting for room."""
        total = self._manager.reread_seconds
        reread, self._reread_seconds = total - self._reread_seconds, total
        waited, self._room_seconds = self._room_seconds, 0.0
        return reread + waited * self._bounds.reach / self._manager.host_bytes

    def _kv_loss(self) -> float:
        """The same of KV blocks: computing again the prefixes that were evicted and the sequences
        that found no room."""
        total = self._kv.num_lost_host_tokens
        num_lost, self._num_lost_tokens = total - self._num_lost_tokens, total
        return self._costs.recompute_seconds(num_lost)
