"""The blocks of the group of states. Torch-free.

A block holds the layers' states after the last computed one of its tokens. A step reads the block
of the token before its first one and writes that of its last one; those in between are never
allocated, so they stay NULL_BLOCK in the table. A full block that was written is a snapshot of the
states at its end, which other sequences may share as a prefix. Within a block the states are
replaced, so no step may compute tokens of an unfinished block and of one after it: the block would
be taken for a snapshot. `Step.room_for` sees to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .block_pool import NULL_BLOCK
from .group_blocks import GroupBlocks, joined
from .layout import KvGroup, OperationLog, num_blocks_for
from .prefix_cache import Prefix
from .sequence_blocks import SequenceBlocks


class StateBlocks(GroupBlocks):
    """Manages them like the blocks of a window of two tokens, of which a sequence holds one or two.

    The blocks that decoding fills are no snapshots: they would soon take the place of those at the
    ends of prompts.
    """

    def __init__(
        self,
        index: int,
        layout: KvGroup,
        block_size: int,
        *,
        num_swap_slots: int,
        operations: OperationLog,
        clock: Callable[[], float],
        tenant_cap: float = 1.0,
    ) -> None:
        super().__init__(
            index,
            layout,
            block_size,
            num_swap_slots=num_swap_slots,
            operations=operations,
            clock=clock,
            tenant_cap=tenant_cap,
        )
        self._decoded: set[int] = set()
        """Blocks whose first token was decoded."""

    def num_held(self, seq: SequenceBlocks) -> int:
        num_on_device = int(np.count_nonzero(seq.tables[self.index]))
        return num_on_device + len(seq.host_slots[self.index])

    def can_fork(self, parent: SequenceBlocks, num_tokens: int) -> bool:
        """Whether the parent holds the states after `num_tokens`: those of a full block."""
        num_blocks, num_others = divmod(num_tokens, self._block_size)
        if num_others or not num_blocks:
            return False
        return parent.tables[self.index].item(num_blocks - 1) != NULL_BLOCK

    def num_missing(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> int:
        total = num_computed + num_tokens - seq.num_evicted
        num_blocks = num_blocks_for(total, self._block_size)
        num_new = min(max(num_blocks - len(seq.tables[self.index]), 0), 1)
        if chunk is not None and num_new:
            peak = self.layout.peak_blocks(total, chunk, self._block_size)
            num_new = max(peak - self.num_held(seq), 0)
        if seq.is_swapped:
            return num_new + self._num_to_restore(seq)
        return num_new

    def grow(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> None:
        table = seq.tables[self.index]
        start = num_computed - seq.num_evicted
        num_blocks = num_blocks_for(start + num_tokens, self._block_size)
        assert num_blocks <= len(table) or start == len(table) * self._block_size, (
            "a step computes tokens of an unfinished block and of another"
        )
        if num_blocks <= len(table):
            assert not self._is_shared(table.item(-1)), "others hold an unfinished block"
            return
        new = self._allocate(1)
        if num_tokens == 1:
            self._decoded.update(new)
        self._operations.zero(self.index, new)
        skipped = [NULL_BLOCK] * (num_blocks - len(table) - 1)
        seq.tables[self.index] = joined(table, skipped, new)

    def publish(self, seq: SequenceBlocks, index: int, prefix: Prefix) -> None:
        if seq.tables[self.index].item(index) not in self._decoded:
            super().publish(seq, index, prefix)

    def leave_behind(self, seq: SequenceBlocks, num_cached: int) -> None:
        start = seq.num_freed[self.index]
        stop = self.layout.first_kept_block(num_cached, self._block_size)
        if stop <= start:
            return
        left = seq.tables[self.index][start:stop].tolist()
        self._free(seq, left)
        for block_id in self._decoded.intersection(left):
            self.pool.forget(block_id)
        self._replace(seq, start, [NULL_BLOCK] * (stop - start))
        seq.num_freed[self.index] = stop

    def _allocate(self, count: int) -> list[int]:
        block_ids = super()._allocate(count)
        self._decoded.difference_update(block_ids)
        return block_ids

    def _to_swap(self, seq: SequenceBlocks, num_blocks: int) -> list[int]:
        """The states after the last computed token alone."""
        return [num_blocks - 1] if num_blocks else []

    def _check_sequence(self, seq: SequenceBlocks) -> None:
        table = seq.tables[self.index].tolist()
        assert len(table) == len(seq.tables[0]), "tables of different length"
        if seq.is_swapped:
            assert not any(table), "states are on the device and on the host"
        elif table:
            assert table[-1] != NULL_BLOCK, "a sequence has no states"
        # While a step is in flight, the next one has its block too.
        assert np.count_nonzero(table) <= 3, f"a sequence holds {table}"
        self._check_published(seq)
