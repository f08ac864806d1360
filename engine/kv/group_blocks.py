"""The blocks of one KV group: on the device, in the prefix cache and on the host. Torch-free."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ...adapters.ghosts import Ghosts
from ...adapters.identity import AdapterKey
from .block_pool import NULL_BLOCK, BlockPool
from .host_slots import HostSlots
from .layout import (
    CopyBlock,
    GiveBackBlocks,
    GiveUpSlots,
    KvGroup,
    OperationLog,
    RestoreBlocks,
    SwapIn,
    SwapOut,
    ZeroBlocks,
    num_blocks_for,
)
from .open_slots import OpenSlots
from .prefix_cache import CachedBlocks, Prefix
from .sequence_blocks import NO_BLOCKS, BlockTable, SequenceBlocks, block_table


class Disk(Protocol):
    """The tier below the host."""

    def offer(self, group: int, prefix: Prefix) -> None:
        """The block of this prefix is complete: write it when there is time."""

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The slot with this prefix."""


class GroupBlocks:
    """Manages the blocks of one group; `KvBlocks` keeps the groups consistent.

    Every block and every host slot is free or held by sequences. A table entry is NULL_BLOCK
    exactly if a window has freed the block or if it is on the host.
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
        num_open_slots: int | None = None,
        tenant_cap: float = 1.0,
    ) -> None:
        """`num_open_slots`, `tenant_cap`: see `KvBlocks`."""
        self.index = index
        self.layout = layout
        self.num_sink_blocks = layout.num_sink_blocks(block_size)
        self.pool = BlockPool(layout.num_reserved, clock=clock)
        if layout.gives_end:
            self.pool.withdraw_last(layout.num_more)
        else:
            self.pool.withdraw(layout.num_more)
        self.cached = CachedBlocks(self.pool)
        self.cached.on_evict = self._note_evicted
        self.ghosts: Ghosts[bytes] = Ghosts()
        """The prefixes that were evicted last, and are not on host or disk; sizes in blocks."""
        self.host = HostSlots(num_swap_slots, tenant_cap=tenant_cap)
        self.host.prefixes.on_evict = self._note_evicted_on_host
        self.num_fetched = 0
        """Blocks copied back from the host."""
        self.num_moved = 0
        """Blocks whose content was moved because they were among the last."""
        self.disk: Disk | None = None
        """Where published blocks are written to as well."""
        self.open = None if num_open_slots is None else OpenSlots(num_open_slots)
        """None: every block may be written at any time."""
        if self.open:
            self.pool.on_free = self.open.close
        self._block_size = block_size
        self._operations = operations

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def num_lasting(self) -> int:
        """The blocks that the pool never loses."""
        return self.layout.num_usable - self.layout.num_less

    @property
    def used_fraction(self) -> float:
        """The share of the blocks that sequences hold."""
        return 1 - self.pool.num_free / self.pool.num_usable

    def longest(self, chunk: int) -> int:
        """The maximum number of tokens of a sequence that runs alone, with `chunk` tokens per
        step."""
        if self.fits_alone(sys.maxsize, chunk):
            return sys.maxsize
        return self.num_lasting * self._block_size

    def fits_alone(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence that runs alone can have `num_tokens`, with `chunk` tokens per
        step."""
        peak = self.layout.peak_blocks(num_tokens, chunk, self._block_size)
        return peak <= self.num_lasting

    def num_held(self, seq: SequenceBlocks) -> int:
        """The number of device blocks; for a swapped sequence, those it will need."""
        return len(seq.tables[self.index]) - len(self._left(seq))

    def num_seen(self, num_blocks: int) -> int:
        """How many of the first `num_blocks` the next query sees, without sinks."""
        return num_blocks - max(self._first_visible(num_blocks), self.num_sink_blocks)

    # --- prefixes and forks -----------------------------------------------------------------------

    def has(self, prefix: Prefix, *, on_host: bool, on_disk: bool = False) -> bool:
        """Whether the prefix is cached on the device or, with `on_host`, on the host or, with
        `on_disk`, on the disk."""
        if self.cached.find(prefix) is not None:
            return True
        if on_host and self.host.find(prefix) is not None:
            return True
        return on_disk and self.disk is not None and self.disk.find(self.index, prefix) is not None

    def to_read(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """What of this prefix `take_prefix` needs and the disk alone has."""
        first = self._first_visible(len(prefixes))
        return [
            prefix
            for index, prefix in enumerate(prefixes)
            if not self.num_sink_blocks <= index < first and not self.has(prefix, on_host=True)
        ]

    def num_to_fetch(self, prefixes: Sequence[Prefix]) -> int:
        """How many blocks of this prefix `take_prefix` finds on the host alone."""
        first = self._first_visible(len(prefixes))
        return sum(
            self.cached.find(prefix) is None
            for index, prefix in enumerate(prefixes)
            if not self.num_sink_blocks <= index < first
        )

    def take_prefix(self, seq: SequenceBlocks, prefixes: Sequence[Prefix]) -> None:
        """Give an empty sequence the cached blocks of its prefix that its next query sees, and hold
        those that are on the host alone."""
        seq.num_freed[self.index] = self._first_visible(len(prefixes))
        left, block_ids = self._left(seq), []
        slots = seq.host_slots[self.index]
        for index, prefix in enumerate(prefixes):
            found = NULL_BLOCK if index in left else self.cached.find(prefix)
            if found is None:
                found, slot = NULL_BLOCK, self.host.find(prefix)
                assert slot is not None, "the prefix was found before"
                slots[index] = slot
            block_ids.append(found)
        self._share(seq, block_ids)
        self.host.share(slots.values())
        seq.tables[self.index] = block_table(block_ids)

    def cached_blocks(self, prefixes: Sequence[Prefix]) -> dict[int, int]:
        """By table index, the device's blocks of a cached prefix that the query after it sees."""
        first = self._first_visible(len(prefixes))
        seen = [i for i in range(len(prefixes)) if not self.num_sink_blocks <= i < first]
        found = ((index, self.cached.find(prefixes[index])) for index in seen)
        return {index: block_id for index, block_id in found if block_id is not None}

    def publish(self, seq: SequenceBlocks, index: int, prefix: Prefix) -> None:
        """Publish a written block, or replace it by an equal block that is already cached."""
        own = seq.tables[self.index].item(index)
        if own == NULL_BLOCK:
            return
        cached = self.cached.publish(prefix, own)
        if self.disk is not None:
            self.disk.offer(self.index, prefix)
        if cached != own:
            self._replace(seq, index, [cached])
            self._share(seq, [cached])
            self._free(seq, [own])
            self.pool.forget(own)

    def can_fork(self, parent: SequenceBlocks, num_tokens: int) -> bool:
        """Whether the parent still has the blocks that the query after its first `num_tokens`
        sees, and the block of this query can be written."""
        num_full, num_others = divmod(num_tokens, self._block_size)
        if self.open and num_others:
            own = parent.tables[self.index].item(num_full)
            if own not in self.open:
                return False
        return self.sees_all_it_needs(parent, num_tokens)

    def sees_all_it_needs(self, seq: SequenceBlocks, num_tokens: int) -> bool:
        """Whether no window has freed a block that the query after the first `num_tokens` sees."""
        first = self.layout.first_visible_block(num_tokens, self._block_size)
        return seq.num_freed[self.index] <= max(first, self.num_sink_blocks)

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> None:
        """Let an empty `child` share the parent's blocks of the first `num_tokens`."""
        num_blocks = num_blocks_for(num_tokens, self._block_size)
        table = child.tables[self.index] = parent.tables[self.index][:num_blocks]
        self._share(child, table.tolist())
        child.num_freed[self.index] = parent.num_freed[self.index]

    # --- growing and shrinking --------------------------------------------------------------------

    def num_missing(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> int:
        """See `KvBlocks.num_missing`."""
        start, table = num_computed - seq.num_evicted, seq.tables[self.index]
        total = start + num_tokens
        num_blocks = num_blocks_for(total, self._block_size)
        if seq.eviction:
            num_blocks = seq.eviction.num_blocks(seq.num_evicted, num_computed, num_tokens)
            num_blocks -= len(self._targets(seq))
        num_new = max(num_blocks - len(table), 0)
        if chunk is not None and self.layout.window is not None:
            peak = self.layout.peak_blocks(total, chunk, self._block_size)
            num_new = min(num_new, max(peak - self.num_held(seq), 0))
        if seq.is_swapped:
            return num_new + self._num_to_restore(seq)
        first = start // self._block_size
        if first >= len(table):
            return num_new  # nothing is written to a block that the sequence holds
        return num_new + sum(map(self._is_shared, table[first:].tolist()))

    def grow(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> None:
        """Make `num_tokens` more tokens writable. Enough free blocks must exist."""
        table, start = seq.tables[self.index], num_computed - seq.num_evicted
        first = start // self._block_size
        held = table[first:].tolist() if first < len(table) else []
        own = [self._own(seq, block_id) for block_id in held]
        num_blocks = num_blocks_for(start + num_tokens, self._block_size)
        new = self._allocate(max(num_blocks - len(table), 0))
        if new or own != held:
            seq.tables[self.index] = joined(table[:first], own + new)
        self._operations.zero(self.index, new, self.open.open(new) if self.open else ())

    def allocate_targets(self, seq: SequenceBlocks) -> BlockTable:
        """Blocks for what a compaction keeps; enough free ones must exist."""
        assert seq.eviction is not None, "only such a sequence is compacted"
        block_ids = self._allocate(seq.eviction.num_target_blocks)
        self._operations.zero(self.index, block_ids)
        return block_table(block_ids)

    def compact(self, seq: SequenceBlocks) -> None:
        """Replace the sequence's blocks by its targets. Others may still hold the old ones."""
        self._free(seq, seq.tables[self.index].tolist())
        seq.tables[self.index] = seq.targets[self.index]

    def can_open(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Whether the blocks that `grow` allocates can be open."""
        if self.open is None:
            return True
        if seq.is_swapped:  # what comes back is complete
            total = num_computed + num_tokens - seq.num_evicted
            num_blocks = num_blocks_for(total, self._block_size)
            num_new = num_blocks - len(seq.tables[self.index])
        else:
            num_new = self.num_missing(seq, num_computed, num_tokens)
        return num_new <= self.open.num_free

    def close(self, seq: SequenceBlocks, num_full: int) -> None:
        """Close those of the first `num_full` blocks that are open: their tokens are final."""
        if self.open is None:
            return
        table = seq.tables[self.index]
        for index in reversed(range(num_full)):
            if not self.open.close(table.item(index)):
                return  # blocks are completed in order

    def leave_behind(self, seq: SequenceBlocks, num_cached: int) -> None:
        """Free the blocks that are outside the window of the query at place `num_cached`."""
        start = max(seq.num_freed[self.index], self.num_sink_blocks)
        stop = self.layout.first_kept_block(num_cached, self._block_size)
        if stop <= start:
            return
        self._free(seq, seq.tables[self.index][start:stop].tolist())
        self._replace(seq, start, [NULL_BLOCK] * (stop - start))
        seq.num_freed[self.index] = stop

    def remove_left(self, seq: SequenceBlocks, first: int, count: int) -> None:
        """Remove the table's entries `[first, first + count)`, whose blocks the window has
        freed."""
        table = seq.tables[self.index]
        seq.tables[self.index] = joined(table[:first], table[first + count :])
        seq.num_freed[self.index] -= count

    def shrink(self, seq: SequenceBlocks, num_blocks: int) -> None:
        """Free the blocks after the first `num_blocks`, to be reused first."""
        table = seq.tables[self.index]
        if len(table) <= num_blocks:
            return
        seq.tables[self.index], spare = table[:num_blocks], table[num_blocks:].tolist()
        self._free(seq, spare)
        for block_id in reversed(spare):
            self.pool.forget(block_id)

    def release(self, seq: SequenceBlocks) -> None:
        """Free all blocks and host slots."""
        table, slots = seq.tables[self.index], seq.host_slots[self.index]
        self._free(seq, [*table.tolist(), *self._targets(seq)])
        self.host.give_back(list(slots.values()))
        seq.tables[self.index] = NO_BLOCKS
        slots.clear()
        seq.num_freed[self.index] = 0

    def drop_adapter(self, key: AdapterKey) -> int:
        """Drop the cached prefixes of this adapter and of its compositions, and zero what nobody
        holds; returns their number."""
        block_ids = self.cached.drop_adapter(key)
        slots = self.host.prefixes.drop_adapter(key)
        if free := tuple(block for block in block_ids if not self.pool.ref_count(block)):
            self._operations.add(ZeroBlocks(self.index, free))  # apart from those that are opened
        self.erase_on_host(slots)
        return len(block_ids) + len(slots)

    def erase_on_host(self, slots: Sequence[int]) -> None:
        """Copy the null block over what these slots have stored."""
        for slot in slots:
            self._operations.keep(self.index, NULL_BLOCK, slot)

    # --- the border -------------------------------------------------------------------------------

    def withdraw(self, count: int) -> None:
        """Take free blocks out of use and give their memory back; there must be as many."""
        if block_ids := self.pool.withdraw(count):
            self._operations.add(GiveBackBlocks(self.index, tuple(block_ids)))

    def withdraw_last(self, count: int, live: Iterable[SequenceBlocks]) -> None:
        """Take the last blocks out of use and zero them; there must be as many free ones. What they
        hold moves to blocks that lose their content. `live`: every sequence.

        The tables change now, the cache when the queued operations are executed. It must not be
        read or written in between.
        """
        block_ids, moves = self.pool.withdraw_last(count)
        if not block_ids:
            return
        self.cached.move(moves)
        for source, target in moves.items():
            if self.pool.ref_count(target) or target in self.cached:
                self._operations.add(CopyBlock(self.index, source, target))
        self._operations.add(GiveBackBlocks(self.index, tuple(block_ids)))
        if moves:
            self._move_tables(moves, live)
            self.num_moved += len(moves)

    def _move_tables(self, moves: Mapping[int, int], live: Iterable[SequenceBlocks]) -> None:
        moved = np.arange(self.pool.num_blocks)
        moved[list(moves)] = list(moves.values())
        first = min(moves)
        for seq in live:
            for tables in (seq.tables, seq.targets):
                if tables and tables[self.index].max(initial=NULL_BLOCK) >= first:
                    tables[self.index] = block_table(moved[tables[self.index]])

    def restore(self, count: int) -> None:
        """Take withdrawn blocks into use again; there must be as many."""
        if block_ids := self.pool.restore(count):
            self._operations.add(RestoreBlocks(self.index, tuple(block_ids)))

    def withdraw_slots(self, count: int) -> None:
        """Take free host slots out of use and let others have the memory of as many places; there
        must be as many. Not while any is filling."""
        first = self.host.num_withdrawn
        if slots := self.host.withdraw(count):
            assert not self.host.filling, "a block that is being read stays where it is"
            self._operations.add(GiveUpSlots(self.index, tuple(slots), first))

    # --- swapping ---------------------------------------------------------------------------------

    def num_to_swap(self, seq: SequenceBlocks, num_blocks: int) -> int:
        """How many of the first `num_blocks` are not freed by a window."""
        return len(self._to_swap(seq, num_blocks))

    def swap_out(self, seq: SequenceBlocks, num_blocks: int) -> None:
        """Move the first `num_blocks` to the host, which must have room, and free the others."""
        table, indices = seq.tables[self.index].tolist(), self._to_swap(seq, num_blocks)
        slots = self.host.take(len(indices))
        moved = tuple(table[index] for index in indices)
        self._operations.add(SwapOut(self.index, moved, tuple(slots)))
        self._free(seq, [*table, *self._targets(seq)])
        seq.host_slots[self.index] = dict(zip(indices, slots, strict=True))
        seq.tables[self.index] = block_table([NULL_BLOCK] * num_blocks)

    def swap_in(self, seq: SequenceBlocks) -> None:
        """Swap the sequence in: reuse blocks that are still cached, and copy the others from the
        host. Prefixes that come back are cached at once, because they are copied before any step
        reads them."""
        table, slots = seq.tables[self.index].tolist(), seq.host_slots[self.index]
        for index in slots:
            if (cached := self._cached_again(seq, index)) is not None:
                self._share(seq, [cached])
                table[index] = cached
        indices = [index for index in slots if table[index] == NULL_BLOCK]
        block_ids = self._allocate(len(indices))
        for index, block_id in zip(indices, block_ids, strict=True):
            table[index] = block_id
            if index < seq.num_published:
                self.cached.publish(seq.chain[index], block_id)
        if indices:
            sources = tuple(slots[index] for index in indices)
            self._operations.add(SwapIn(self.index, sources, tuple(block_ids)))
            self.num_fetched += len(indices) if seq.num_to_fetch else 0
        seq.tables[self.index] = block_table(table)
        self.host.give_back(list(slots.values()))
        slots.clear()

    # --- integrity --------------------------------------------------------------------------------

    def check_integrity(self, live: Collection[SequenceBlocks]) -> None:
        """Assert that every block and slot is free or held by exactly these sequences."""
        self.pool.check_integrity()
        if self.open:
            self.open.check_integrity(self.pool.ref_count)
        self.cached.check_integrity()
        holders = Counter(
            block_id
            for seq in live
            for block_id in (*seq.tables[self.index].tolist(), *self._targets(seq))
        )
        for block_id in range(1, self.pool.num_blocks):
            count = self.pool.ref_count(block_id)
            assert count == holders[block_id], (
                f"group {self.index}: block {block_id} counts {count} holders, "
                f"has {holders[block_id]}"
            )
        self.host.check_integrity(
            slot for seq in live for slot in seq.host_slots[self.index].values()
        )
        for seq in live:
            self._check_sequence(seq)

    def _check_sequence(self, seq: SequenceBlocks) -> None:
        table, slots = seq.tables[self.index], seq.host_slots[self.index]
        assert len(table) == len(seq.tables[0]), "tables of different length"
        for index, block_id in enumerate(table.tolist()):
            absent = index in self._left(seq) or index in slots
            assert absent == (block_id == NULL_BLOCK), f"block {index} of a table is {block_id}"
        self._check_published(seq)

    def _check_published(self, seq: SequenceBlocks) -> None:
        for index, block_id in enumerate(seq.tables[self.index].tolist()):
            prefix = self.cached.prefix_of(block_id)
            if prefix is not None and index < seq.num_published:
                assert prefix == seq.chain[index], f"block {block_id} is published as another's"

    # --- the inside -------------------------------------------------------------------------------

    def _targets(self, seq: SequenceBlocks) -> list[int]:
        return seq.targets[self.index].tolist() if seq.targets else []

    def _left(self, seq: SequenceBlocks) -> range:
        """The table indices whose blocks the window has freed."""
        return range(self.num_sink_blocks, seq.num_freed[self.index])

    def _is_shared(self, block_id: int) -> bool:
        return self.pool.ref_count(block_id) > 1

    def _first_visible(self, num_blocks: int) -> int:
        return self.layout.first_visible_block(num_blocks * self._block_size, self._block_size)

    def _to_swap(self, seq: SequenceBlocks, num_blocks: int) -> list[int]:
        left = self._left(seq)
        return [index for index in range(num_blocks) if index not in left]

    def _cached_again(self, seq: SequenceBlocks, index: int) -> int | None:
        """The device block that still has the swapped-out content, if any."""
        return self.cached.find(seq.chain[index]) if index < seq.num_published else None

    def _num_to_restore(self, seq: SequenceBlocks) -> int:
        found = (self._cached_again(seq, index) for index in seq.host_slots[self.index])
        return sum(block_id is None or not self.pool.ref_count(block_id) for block_id in found)

    def _own(self, seq: SequenceBlocks, source: int) -> int:
        """The block to write instead of this one: a copy if it is shared, or else itself,
        unpublished."""
        assert self.open is None or source in self.open, f"block {source} is complete"
        if not self._is_shared(source):
            self.cached.forget(source)
            return source
        (target,) = self._allocate(1)
        slot = self.open.open([target])[0] if self.open else None
        self._operations.add(CopyBlock(self.index, source, target, slot))
        self._free(seq, [source])
        return target

    def _note_evicted(self, prefix: Prefix, block_id: int) -> None:
        """Copy a prefix whose block is about to be given other content to the host, if that has
        room for it."""
        slot = self.host.store(prefix) if self.host.num_slots else None
        if slot is not None:
            self._operations.keep(self.index, block_id, slot)
        elif self.ghosts.depth and not self._is_below(prefix):
            self.ghosts.add(prefix.key, 1)

    def _note_evicted_on_host(self, prefix: Prefix, slot: int) -> None:
        on_disk = self.disk is not None and self.disk.find(self.index, prefix) is not None
        if self.host.ghosts.depth and self.cached.find(prefix) is None and not on_disk:
            self.host.ghosts.add(prefix.key, 1)

    def _is_below(self, prefix: Prefix) -> bool:
        """Whether the host or the disk has it."""
        if self.host.find(prefix) is not None:
            return True
        return self.disk is not None and self.disk.find(self.index, prefix) is not None

    def _replace(self, seq: SequenceBlocks, start: int, block_ids: Sequence[int]) -> None:
        """Put these blocks into the table from index `start` on."""
        table = seq.tables[self.index]
        after = table[start + len(block_ids) :]
        seq.tables[self.index] = joined(table[:start], block_ids, after)

    def _allocate(self, count: int) -> list[int]:
        block_ids = self.pool.allocate(count)
        assert block_ids is not None, "num_missing was asked first"
        return block_ids

    def _share(self, seq: SequenceBlocks, block_ids: Sequence[int]) -> None:
        """Let the sequence hold these blocks too."""
        held = (block_id for block_id in block_ids if block_id != NULL_BLOCK)
        seq.held_seconds[self.index] -= self.pool.share(held)

    def _free(self, seq: SequenceBlocks, block_ids: Sequence[int]) -> None:
        """End the sequence's hold on these blocks."""
        held = [block_id for block_id in block_ids if block_id != NULL_BLOCK]
        seq.held_seconds[self.index] += self.pool.free(held)


def joined(*parts: BlockTable | Sequence[int]) -> BlockTable:
    """One read-only table of these parts."""
    # An empty list is an array of floats.
    table = np.concatenate(parts, dtype=np.int64, casting="unsafe")
    table.flags.writeable = False
    return table
