"""Moves memory between the KV cache and the arena, as `Budget` decides.

One side gives before the other gets. The KV cache gives up free blocks, whose memory goes back to
the system with the next step that is computed here; or its last blocks, if adapters get the same
addresses: what they hold moves to free ones. The arena gives up its end once it is empty. Addresses
stay. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...adapters.manager import AdapterManager
from ..kv.blocks import KvBlocks
from ..kv.layout import KvOperation
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_costs import StepCosts
from .budget import INTERVAL_SECONDS, Bounds, Budget

PATIENCE_SECONDS = 5.0
"""A move that leases, pins or running requests hold up for so long is given up."""
MOST_BLOCKS_PER_STEP = 32
"""Blocks that are given back at once: it takes a system call per block and layer, or copies, and
the step's requests wait for it."""


class Border:
    """The border between the memory of one engine's KV cache and that of its adapters."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        kv: KvBlocks,
        block_bytes: int,
        block_size: int,
        manager: AdapterManager[Any],
        scheduler: Scheduler,
        costs: StepCosts,
        clock: Callable[[], float],
        execute: Callable[[Sequence[KvOperation]], None],
        num_given_back: Callable[[], int],
    ) -> None:
        """`block_bytes`, `block_size`: of a block of the group that gives and gets blocks.
        `execute`: executes operations behind the steps in flight. `num_given_back`: blocks whose
        memory the cache has given back so far."""
        (self._group,) = (group for group in kv.groups if group.layout.may_move)
        self._kv, self._block_bytes, self._block_size = kv, block_bytes, block_size
        self._manager, self._scheduler, self._costs = manager, scheduler, costs
        self._clock, self._execute = clock, execute
        self._num_given_back = num_given_back
        self._num_taken = 0
        """Blocks that the KV cache was told to give back so far."""
        self._bounds = bounds
        self._budget = Budget(bounds, manager.arena_bytes, clock())
        self._group.ghosts.depth = bounds.reach // block_bytes
        manager.remember_evicted(bounds.reach)
        self._begun_at = self._polled_at = clock()
        self._room_seconds = self._block_seconds = 0.0
        """Time in which requests waited for room in the arena, or for KV blocks, since the last
        decision."""
        self._reload_seconds = 0.0
        self._num_lost_blocks = 0
        self.num_moves = 0
        """Steps by which the border has moved."""

    def poll(self) -> None:
        """Hand over what has come free, and decide when it is time."""
        now = self._clock()
        self._note_waiting(now)
        self._hand_over()
        if self._is_moving:
            if now - self._begun_at >= PATIENCE_SECONDS:
                self._give_up()
        elif self._budget.is_due(now):
            self._decide(now)

    @property
    def _is_moving(self) -> bool:
        return self._budget.adapter_bytes != self._manager.arena_bytes

    @property
    def _spare_bytes(self) -> int:
        """Bytes that neither side uses."""
        kv_bytes = self._group.pool.num_usable * self._block_bytes
        return self._bounds.total - self._manager.arena_bytes - kv_bytes

    def _hand_over(self) -> None:
        """Give the spare bytes to the side that should have more, then take the rest of what it
        should have from the other one: adapters get those once their memory is given back."""
        wanted, arena_bytes = self._budget.adapter_bytes, self._manager.arena_bytes
        if wanted <= arena_bytes:
            count = min(self._spare_bytes // self._block_bytes, self._group.pool.num_withdrawn)
            self._group.restore(count)
            return
        if self._spare_bytes >= wanted - arena_bytes:
            if self._is_given_back:
                self._manager.resize(wanted)
            return
        missing = wanted - arena_bytes - self._spare_bytes
        self._take_blocks(min(-(-missing // self._block_bytes), self._num_to_spare))

    @property
    def _is_given_back(self) -> bool:
        """Whether the memory of all withdrawn blocks is given back: stages of a pipeline do it in
        their next step."""
        return self._num_given_back() == self._num_taken

    def _take_blocks(self, count: int) -> None:
        self._num_taken += count
        if not self._group.layout.gives_end:
            self._group.withdraw(count)
        elif count:
            # Nothing may come between a table and the bytes of its blocks. With stages the bytes
            # move when the next step begins here: none that drafts or reads prompts is in flight.
            live = (request.kv for request in self._scheduler.requests())
            self._group.withdraw_last(count, live)
            self._execute(self._kv.operations.take())

    @property
    def _num_to_spare(self) -> int:
        """Free blocks that may go now: half, so that running requests find some in the next
        step."""
        pool = self._group.pool
        num_lendable = pool.num_usable - self._group.num_lasting
        return min(pool.num_free // 2, num_lendable, MOST_BLOCKS_PER_STEP)

    def _decide(self, now: float) -> None:
        before = self._budget.adapter_bytes
        wanted = self._budget.decide(
            self._adapter_loss(), self._kv_loss(), now, needed=self._manager.awaited_room
        )
        if wanted == before:
            return
        self.num_moves += 1
        self._begun_at = now
        if wanted < before:
            self._manager.resize(wanted)

    def _give_up(self) -> None:
        """Stay where the border is."""
        self._budget.adapter_bytes = self._manager.arena_bytes
        self._manager.resize(self._manager.arena_bytes)

    def _note_waiting(self, now: float) -> None:
        # Longer than a decision's interval nobody polls but an engine without requests.
        elapsed, self._polled_at = min(now - self._polled_at, INTERVAL_SECONDS), now
        if self._manager.is_short_of_room:
            self._room_seconds += elapsed
        if self._scheduler.is_short_of_kv:
            self._block_seconds += elapsed

    def _adapter_loss(self) -> float:
        """Seconds since the last call that `reach` more bytes of arena would have spared: loads of
        adapters that were evicted, and that part of the waiting for room."""
        total = self._manager.reload_seconds
        reloads, self._reload_seconds = total - self._reload_seconds, total
        waited, self._room_seconds = self._room_seconds, 0.0
        return reloads + waited * self._bounds.reach / self._manager.arena_bytes

    def _kv_loss(self) -> float:
        """The same of the KV cache: prefixes that were evicted and are computed again, and that
        part of the waiting for blocks."""
        total = self._kv.num_lost_blocks
        num_lost, self._num_lost_blocks = total - self._num_lost_blocks, total
        recomputed = self._costs.recompute_seconds(num_lost * self._block_size)
        waited, self._block_seconds = self._block_seconds, 0.0
        kv_bytes = self._group.pool.num_usable * self._block_bytes
        return recomputed + waited * self._bounds.reach / kv_bytes
