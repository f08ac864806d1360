"""Which KV blocks every sequence holds: all that the scheduler knows of KV memory.

Torch-free. Bookkeeping happens at once; what it means for the tensors is written down as operations
and executed before the next forward. So a block may be promised before it is zeroed, copied or
filled, but nobody reads it before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from .block_pool import NULL_BLOCK, BlockPool
from .layout import CopyBlock, KvGroup, KvOperation, SwapIn, SwapOut, ZeroBlocks
from .prefix_cache import CachedBlocks, CacheNamespace, Prefix, PrefixHasher
from .swap_space import SwapSpace


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """The blocks of one sequence; only KvBlocks changes it. All tables are equally long."""

    tables: list[list[int]]
    """Per group the block of positions `[i * size, (i + 1) * size)`; NULL_BLOCK where it was freed
    behind a window or swapped out."""
    num_freed: list[int]
    """Per group how many blocks, counted from the first, windows have left; sinks stay."""
    host_slots: list[dict[int, int]]
    """Per group, by table index, where the content of swapped-out blocks is."""
    num_writable: int = 0
    """Up to here what is not computed may be written: known to be there and nobody else's."""
    num_tokens_handled: int = 0
    """Until more than this is computed, `KvBlocks.advance` has nothing to do."""
    num_published: int = 0
    """Blocks, from the first, that were offered to the prefix cache or found there."""
    chain: list[Prefix] = field(default_factory=list)
    """The names of the sequence's prefixes as far as they are known: at least the published."""

    @property
    def is_swapped(self) -> bool:
        return any(self.host_slots)


class _Group:
    """One group's layout, device blocks, cached blocks and host slots."""

    def __init__(self, index: int, layout: KvGroup, block_size: int, num_slots: int) -> None:
        self.index = index
        self.layout = layout
        self.num_sink_blocks = layout.num_sink_blocks(block_size)
        self.pool = BlockPool(layout.num_blocks)
        self.cached = CachedBlocks(self.pool)
        self.swap = SwapSpace(num_slots)

    def left(self, seq: SequenceBlocks) -> range:
        """Table indices freed behind the window."""
        return range(self.num_sink_blocks, seq.num_freed[self.index])

    def num_held(self, seq: SequenceBlocks) -> int:
        """Device blocks; for a swapped sequence those it will hold again."""
        return len(seq.tables[self.index]) - len(self.left(seq))

    def is_shared(self, block_id: int) -> bool:
        return self.pool.ref_count(block_id) > 1


class PoolUse(NamedTuple):
    """What the blocks of one group are used for."""

    num_usable: int
    num_free: int
    """That no sequence holds."""
    num_cached: int
    """Of these, who hold a prefix that may be found."""


class KvBlocks:
    """Gives sequences blocks of every group, all groups or none."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        block_size: int,
        *,
        prefix_secret: bytes | None,
        num_swap_slots: Sequence[int] = (),
    ) -> None:
        """`prefix_secret` keys the prefix cache's hashes; None: no prefix cache.

        `num_swap_slots`: host slots per group; empty: no swapping.
        """
        slots = tuple(num_swap_slots) or (0,) * len(groups)
        self.num_copies = 0
        """Blocks copied on write."""
        self.num_swapped_out = 0
        """Blocks."""
        self.num_swapped_in = 0
        self._block_size = block_size
        self._groups = [
            _Group(index, layout, block_size, count)
            for index, (layout, count) in enumerate(zip(groups, slots, strict=True))
        ]
        self._windowed = [group for group in self._groups if group.layout.window is not None]
        self._hasher = PrefixHasher(block_size, secret=prefix_secret) if prefix_secret else None
        self._operations: list[KvOperation] = []
        self._to_zero: list[list[int]] = [[] for _ in groups]

    # --- a sequence's way -------------------------------------------------------------------------

    def new_sequence(self) -> SequenceBlocks:
        count = len(self._groups)
        return SequenceBlocks(
            tables=[[] for _ in range(count)],
            num_freed=[0] * count,
            host_slots=[{} for _ in range(count)],
        )

    def match(
        self, seq: SequenceBlocks, namespace: CacheNamespace, token_ids: Sequence[int]
    ) -> int:
        """Share the longest cached prefix, at least one token short of the whole; its tokens.

        The sequence must be empty.
        """
        assert not seq.tables[0], "only an empty sequence can take over a prefix"
        if self._hasher is None:
            return 0
        num_blocks = self._longest_hit(self._hasher, seq.chain, namespace, token_ids)
        num_tokens = num_blocks * self._block_size
        for group in self._groups:
            seq.num_freed[group.index] = self._first_visible(group, num_tokens)
            left = group.left(seq)
            table = seq.tables[group.index]
            for index in range(num_blocks):
                found = NULL_BLOCK if index in left else group.cached.find(seq.chain[index])
                assert found is not None
                table.append(found)
            group.pool.share(block_id for block_id in table if block_id != NULL_BLOCK)
        seq.num_published = num_blocks
        return num_tokens

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> bool:
        """Let `child` share the parent's blocks of the first `num_tokens`, copied on write.

        Both are of one namespace and agree in these tokens, which are computed. False, and nothing
        shared, if the parent is swapped out or has left behind what the child's windows need.
        """
        assert not child.tables[0], "only an empty sequence can become a fork"
        if parent.is_swapped or any(
            parent.num_freed[group.index]
            > max(self._first_visible(group, num_tokens), group.num_sink_blocks)
            for group in self._windowed
        ):
            return False
        num_blocks = self._blocks_of(num_tokens)
        for group in self._groups:
            table = parent.tables[group.index][:num_blocks]
            group.pool.share(block_id for block_id in table if block_id != NULL_BLOCK)
            child.tables[group.index] = table
        parent.num_writable = 0
        child.num_freed = list(parent.num_freed)
        child.num_published = min(parent.num_published, num_tokens // self._block_size)
        child.chain = parent.chain[: num_tokens // self._block_size]
        return True

    def num_missing(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> tuple[int, ...]:
        """Per group, how many free blocks it takes to compute `num_tokens` more.

        Copies on write and the way back from the host are included. `chunk`: computed in steps of
        at most so many tokens, windows freeing blocks in between; None: in one step.
        """
        total = num_computed + num_tokens
        missing = []
        for group in self._groups:
            count = max(self._blocks_of(total) - len(seq.tables[group.index]), 0)
            if chunk is not None and group.layout.window is not None:
                peak = group.layout.peak_blocks(total, chunk, self._block_size)
                count = min(count, max(peak - group.num_held(seq), 0))
            if seq.is_swapped:
                count += self._num_to_restore(group, seq)
            else:
                count += sum(
                    group.is_shared(seq.tables[group.index][index])
                    for index in self._written_again(seq, num_computed)
                )
            missing.append(count)
        return tuple(missing)

    def can_grow(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> bool:
        missing = self.num_missing(seq, num_computed, num_tokens, chunk)
        return all(
            count <= group.pool.num_free for count, group in zip(missing, self._groups, strict=True)
        )

    def grow(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make `num_tokens` more tokens writable, in all groups or not at all (False)."""
        if num_computed + num_tokens <= seq.num_writable:
            return True
        if not self.can_grow(seq, num_computed, num_tokens):
            return False
        if seq.is_swapped:
            self._swap_in(seq)
        written_again = self._written_again(seq, num_computed)
        for group in self._groups:
            table = seq.tables[group.index]
            self._own(group, table, written_again)
            new = self._allocate(group, self._blocks_of(num_computed + num_tokens) - len(table))
            table += new
            self._to_zero[group.index] += new
        seq.num_writable = len(seq.tables[0]) * self._block_size
        return True

    def advance(
        self,
        seq: SequenceBlocks,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        num_computed: int,
    ) -> None:
        """After the step: publish the blocks it filled, free what windows have left behind.

        `token_ids` must be final up to `num_computed`.
        """
        num_full = num_computed // self._block_size
        if self._hasher is not None and num_full > seq.num_published:
            for index in range(seq.num_published, num_full):
                prefix = self._hasher.prefix(seq.chain, index, namespace, token_ids)
                for group in self._groups:
                    self._publish(group, seq.tables[group.index], index, prefix)
                seq.num_published = index + 1
        for group in self._windowed:
            self._leave_behind(group, seq, num_computed)
        if not self._windowed:
            seq.num_tokens_handled = (num_full + 1) * self._block_size - 1

    def shrink(self, seq: SequenceBlocks, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens`, of which no more are computed.

        They are handed out first: what they hold is of no use to anybody.
        """
        num_blocks = self._blocks_of(num_tokens)
        for group in self._groups:
            table = seq.tables[group.index]
            spare = table[num_blocks:]
            group.pool.free(spare)
            for block_id in reversed(spare):
                group.pool.forget(block_id)
            del table[num_blocks:]
        seq.num_writable = min(seq.num_writable, num_blocks * self._block_size)

    def release(self, seq: SequenceBlocks) -> None:
        """Give back all blocks and host slots; idempotent."""
        for group in self._groups:
            table, slots = seq.tables[group.index], seq.host_slots[group.index]
            group.pool.free([block_id for block_id in table if block_id != NULL_BLOCK])
            group.swap.give_back(slots.values())
            table.clear()
            slots.clear()
            seq.num_freed[group.index] = 0
        seq.num_published = seq.num_writable = seq.num_tokens_handled = 0

    def swap_out(self, seq: SequenceBlocks, num_computed: int) -> bool:
        """Move the computed blocks to the host.

        False, and nothing done, if it has no room or windows have left nothing to move.

        What others share is copied too: on the device only this sequence's hold on it ends.
        """
        num_blocks = self._blocks_of(num_computed)
        kept = [
            [i for i in range(num_blocks) if i not in group.left(seq)] for group in self._groups
        ]
        if not any(kept) or any(
            len(indices) > group.swap.num_free
            for indices, group in zip(kept, self._groups, strict=True)
        ):
            return False
        for indices, group in zip(kept, self._groups, strict=True):
            table = seq.tables[group.index]
            slots = group.swap.take(len(indices))
            self._log(SwapOut(group.index, tuple(table[i] for i in indices), tuple(slots)))
            self.num_swapped_out += len(slots)
            group.pool.free([block_id for block_id in table if block_id != NULL_BLOCK])
            seq.host_slots[group.index] = dict(zip(indices, slots, strict=True))
            seq.tables[group.index] = [NULL_BLOCK] * num_blocks
        seq.num_writable = 0
        return True

    def take_operations(self) -> list[KvOperation]:
        """What the tensors have to do before the next forward, in this order."""
        self._log_zeros()
        operations, self._operations = self._operations, []
        return operations

    def drop_adapter(self, key: AdapterKey) -> int:
        """Forget all prefixes computed under this adapter; return how many blocks that was."""
        return sum(group.cached.drop_adapter(key) for group in self._groups)

    # --- sizes ------------------------------------------------------------------------------------

    def longest(self) -> int:
        """Tokens one sequence may reach if it runs alone, a block's worth of tokens a step."""
        size = self._block_size
        return min(
            sys.maxsize
            if group.layout.peak_blocks(sys.maxsize, size, size) <= group.pool.num_usable
            else group.pool.num_usable * size
            for group in self._groups
        )

    def fits_alone(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence can reach `num_tokens` alone, `chunk` tokens a step."""
        return all(
            group.layout.peak_blocks(num_tokens, chunk, self._block_size) <= group.pool.num_usable
            for group in self._groups
        )

    def share(self, seq: SequenceBlocks) -> float:
        """The largest part of a group's blocks that the sequence holds."""
        if seq.is_swapped:
            return 0.0
        return max(group.num_held(seq) / group.pool.num_usable for group in self._groups)

    def num_free(self, group: int) -> int:
        return self._groups[group].pool.num_free

    def num_usable(self, group: int) -> int:
        return self._groups[group].pool.num_usable

    @property
    def fullest_group(self) -> int:
        """The group with the largest part of its blocks held."""
        return max(
            range(len(self._groups)),
            key=lambda group: 1 - self.num_free(group) / self.num_usable(group),
        )

    def pool_use(self, group: int) -> PoolUse:
        pool = self._groups[group].pool
        num_cached = self._groups[group].cached.num_unheld
        return PoolUse(pool.num_usable, pool.num_free, num_cached)

    def num_held(self, seq: SequenceBlocks, group: int) -> int:
        """The group's blocks that the sequence holds now."""
        return 0 if seq.is_swapped else self._groups[group].num_held(seq)

    @property
    def num_cached_blocks(self) -> int:
        return sum(len(group.cached) for group in self._groups)

    @property
    def num_prefix_evictions(self) -> int:
        """Cached blocks that were handed out again."""
        return sum(group.cached.num_evictions for group in self._groups)

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Assert that every block and slot is free or held by exactly these sequences."""
        live = list(live)
        for group in self._groups:
            group.pool.check_integrity()
            group.cached.check_integrity()
            holders = Counter(block_id for seq in live for block_id in seq.tables[group.index])
            for block_id in range(1, group.pool.num_blocks):
                count = group.pool.ref_count(block_id)
                assert count == holders[block_id], (
                    f"group {group.index}: block {block_id} counts {count} holders, "
                    f"has {holders[block_id]}"
                )
            group.swap.check_integrity(
                slot for seq in live for slot in seq.host_slots[group.index].values()
            )
            for seq in live:
                self._check_sequence(group, seq)

    def _check_sequence(self, group: _Group, seq: SequenceBlocks) -> None:
        table, slots = seq.tables[group.index], seq.host_slots[group.index]
        assert len(table) == len(seq.tables[0]), "tables of different length"
        for index, block_id in enumerate(table):
            absent = index in group.left(seq) or index in slots
            assert absent == (block_id == NULL_BLOCK), f"block {index} of a table is {block_id}"
            prefix = group.cached.prefix_of(block_id)
            if prefix is not None and index < seq.num_published:
                assert prefix == seq.chain[index], f"block {block_id} is published as another's"

    # --- the inside -------------------------------------------------------------------------------

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _first_visible(self, group: _Group, num_tokens: int) -> int:
        return group.layout.first_visible_block(num_tokens, self._block_size)

    def _longest_hit(
        self,
        hasher: PrefixHasher,
        chain: list[Prefix],
        namespace: CacheNamespace,
        token_ids: Sequence[int],
    ) -> int:
        """Blocks of the longest prefix of which every group has what the next query sees."""
        longest = 0
        runs = [0] * len(self._groups)  # cached blocks in a row, up to the current one
        for index in range((len(token_ids) - 1) // self._block_size):
            prefix = hasher.prefix(chain, index, namespace, token_ids)
            end = index + 1
            complete = True
            for group in self._groups:
                if group.cached.find(prefix) is not None:
                    runs[group.index] += 1
                elif group.layout.window is None or index < group.num_sink_blocks:
                    return longest
                else:
                    runs[group.index] = 0
                first = self._first_visible(group, end * self._block_size)
                if runs[group.index] < end - max(first, group.num_sink_blocks):
                    complete = False
            if complete:
                longest = end
        return longest

    def _written_again(self, seq: SequenceBlocks, num_computed: int) -> range:
        """Table indices that the next tokens write though they are not new."""
        return range(num_computed // self._block_size, len(seq.tables[0]))

    def _own(self, group: _Group, table: list[int], written: range) -> None:
        """Copy what others hold before it is written; what only the cache knows is withdrawn."""
        for index in written:
            source = table[index]
            if group.is_shared(source):
                (target,) = self._allocate(group, 1)
                self._log(CopyBlock(group.index, source, target))
                self.num_copies += 1
                group.pool.free([source])
                table[index] = target
            else:
                group.cached.forget(source)

    def _publish(self, group: _Group, table: list[int], index: int, prefix: Prefix) -> None:
        own = table[index]
        if own == NULL_BLOCK:
            return
        table[index] = cached = group.cached.publish(prefix, own)
        if cached != own:
            group.pool.share([cached])
            group.pool.free([own])
            group.pool.forget(own)

    def _leave_behind(self, group: _Group, seq: SequenceBlocks, num_computed: int) -> None:
        start = max(seq.num_freed[group.index], group.num_sink_blocks)
        stop = group.layout.first_kept_block(num_computed, self._block_size)
        if stop <= start:
            return
        table = seq.tables[group.index]
        group.pool.free(table[start:stop])
        table[start:stop] = [NULL_BLOCK] * (stop - start)
        seq.num_freed[group.index] = stop

    def _cached_again(self, group: _Group, seq: SequenceBlocks, index: int) -> int | None:
        """The device block that still has what was swapped out, if there is one."""
        return group.cached.find(seq.chain[index]) if index < seq.num_published else None

    def _num_to_restore(self, group: _Group, seq: SequenceBlocks) -> int:
        found = (self._cached_again(group, seq, index) for index in seq.host_slots[group.index])
        return sum(block_id is None or not group.pool.ref_count(block_id) for block_id in found)

    def _swap_in(self, seq: SequenceBlocks) -> None:
        for group in self._groups:
            table, slots = seq.tables[group.index], seq.host_slots[group.index]
            for index in slots:
                if (cached := self._cached_again(group, seq, index)) is not None:
                    group.pool.share([cached])
                    table[index] = cached
            indices = [index for index in slots if table[index] == NULL_BLOCK]
            block_ids = self._allocate(group, len(indices))
            for index, block_id in zip(indices, block_ids, strict=True):
                table[index] = block_id
            if indices:
                sources = tuple(slots[index] for index in indices)
                self._log(SwapIn(group.index, sources, tuple(block_ids)))
            self.num_swapped_in += len(indices)
            group.swap.give_back(slots.values())
            slots.clear()
        seq.num_published = 0  # what came back from the host is offered to others again

    def _allocate(self, group: _Group, count: int) -> list[int]:
        block_ids = group.pool.allocate(max(count, 0))
        assert block_ids is not None, "the caller asks can_grow first"
        return block_ids

    def _log(self, operation: KvOperation) -> None:
        self._log_zeros()
        self._operations.append(operation)

    def _log_zeros(self) -> None:
        """Zeros commute with one another, so they are gathered up to the next other operation."""
        for group, block_ids in enumerate(self._to_zero):
            if block_ids:
                self._operations.append(ZeroBlocks(group, tuple(block_ids)))
                self._to_zero[group] = []
