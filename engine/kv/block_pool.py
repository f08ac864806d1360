"""Ownership of KV blocks: holders and free blocks.

Torch-free. On the device, block 0 is the *null block*: never allocated, always zero, used to pad
block tables.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks; a block without holders keeps its content until it is reused.

    Free blocks are handed out least recently freed first. Owners free a sequence's blocks last
    block first, so a cached prefix loses its leaves before its root.

    The seconds for which a block is held are divided equally among its holders of each moment. Each
    block has a meter that grows by seconds per holder. Who begins to hold a block notes the meter,
    and who ends has held it for the difference.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_reuse: Callable[[int], None] | None = None,
        has_null_block: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_reuse(block_id)` is called just before a block is given new content."""
        self.on_free: Callable[[int], object] | None = None
        """Called with a block that has lost its last holder."""
        self._first = int(has_null_block)
        assert num_blocks >= 2 * self._first, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self.on_reuse = on_reuse
        self._ref_counts = [0] * num_blocks
        self._tickets = list(range(num_blocks))
        """By block a number of its own, which goes with the content if that moves."""
        self._free = OrderedDict((ticket, ticket) for ticket in self._tickets[self._first :])
        """By ticket the free blocks, the one that is reused next first."""
        self._withdrawn: list[int] = []
        self._clock = clock
        self._meters = [0.0] * num_blocks
        self._read_at = [0.0] * num_blocks
        """The time up to which each meter has counted."""

    @property
    def num_usable(self) -> int:
        """The maximum number of blocks that one sequence can hold now."""
        return self.num_blocks - self._first - len(self._withdrawn)

    @property
    def num_withdrawn(self) -> int:
        """Blocks that are out of use."""
        return len(self._withdrawn)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The free block that is allocated next; there must be one."""
        return next(iter(self._free.values()))

    def count_free(self, block_ids: Set[int]) -> int:
        """The number of these blocks without a holder."""
        tickets = self._tickets
        return len(self._free.keys() & {tickets[block_id] for block_id in block_ids})

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks, or none (returns None) if there are fewer. Their meters begin at
        0."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[1] for _ in range(count)]
        now = self._clock() if block_ids else 0.0
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._meters[block_id], self._read_at[block_id] = 0.0, now
            if self.on_reuse:
                self.on_reuse(block_id)
        return block_ids

    def withdraw(self, count: int) -> list[int]:
        """Take free blocks out of use, those that would be reused first; there must be as many."""
        block_ids = [self._free.popitem(last=False)[1] for _ in range(count)]
        self._withdrawn += block_ids
        for block_id in block_ids:
            if self.on_reuse:
                self.on_reuse(block_id)
        return block_ids

    def withdraw_last(self, count: int) -> tuple[list[int], dict[int, int]]:
        """Take the last `count` blocks out of use; there must be as many free ones.

        The blocks that would be reused first lose their content, wherever they are. What the last
        blocks hold moves there, with its holders and its turn to be reused. Returns the last
        blocks, and for those whose content moves the new place.
        """
        end = self.num_blocks - len(self._withdrawn)
        last = range(end - 1, end - 1 - count, -1)
        reused = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block_id in reused:
            if self.on_reuse:
                self.on_reuse(block_id)
        targets = [block_id for block_id in reused if block_id not in last]
        sources = set(last).difference(reused)
        moves = dict(zip(sorted(sources), targets, strict=True))
        for source, target in moves.items():
            self._move(source, target)
        self._withdrawn += last
        return list(last), moves

    def _move(self, source: int, target: int) -> None:
        """Let `target`, which is not free and has no holder, be what `source` is."""
        tickets = self._tickets
        tickets[source], tickets[target] = tickets[target], tickets[source]
        if tickets[target] in self._free:
            self._free[tickets[target]] = target
        self._ref_counts[target], self._ref_counts[source] = self._ref_counts[source], 0
        self._meters[target] = self._meters[source]
        self._read_at[target] = self._read_at[source]

    def restore(self, count: int) -> list[int]:
        """Take withdrawn blocks into use again, those that were withdrawn last and before any other
        free block; there must be as many."""
        assert count <= len(self._withdrawn), "only what was withdrawn is restored"
        block_ids = [self._withdrawn.pop() for _ in range(count)]
        for block_id in block_ids:
            self._free[self._tickets[block_id]] = block_id
            self.forget(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> float:
        """Add a holder to blocks whose content is reused; returns the sum of their meters."""
        now, meters = self._clock(), 0.0
        for block_id in block_ids:
            self._free.pop(self._tickets[block_id], None)
            meters += self._read(block_id, now)
            self._ref_counts[block_id] += 1
        return meters

    def free(self, block_ids: Sequence[int]) -> float:
        """Release one hold on each block, in a sequence's order; returns the sum of their
        meters."""
        now, meters = self._clock(), 0.0
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} has no holder"
            meters += self._read(block_id, now)
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free[self._tickets[block_id]] = block_id
                if self.on_free:
                    self.on_free(block_id)
        return meters

    def _read(self, block_id: int, now: float) -> float:
        """The block's meter, which counts nothing while nobody holds the block."""
        if num_holders := self._ref_counts[block_id]:
            self._meters[block_id] += (now - self._read_at[block_id]) / num_holders
        self._read_at[block_id] = now
        return self._meters[block_id]

    def touch(self, block_id: int) -> None:
        """Reuse this block last if it is free, because its content is in use."""
        if (ticket := self._tickets[block_id]) in self._free:
            self._free.move_to_end(ticket)

    def forget(self, block_id: int) -> None:
        """Reuse this block first if it is free, because its content is useless."""
        if (ticket := self._tickets[block_id]) in self._free:
            self._free.move_to_end(ticket, last=False)

    def check_integrity(self) -> None:
        """Assert that every block in use is either free or held, no other is either, and no count
        is negative."""
        assert not any(
            self._tickets[block_id] in self._free or self._ref_counts[block_id]
            for block_id in self._withdrawn
        ), "a withdrawn block is in use"
        assert all(self._tickets[block_id] == ticket for ticket, block_id in self._free.items())
        held = sum(1 for count in self._ref_counts[self._first :] if count > 0)
        assert min(self._ref_counts, default=0) >= 0, "a reference count is negative"
        assert held + len(self._free) == self.num_usable, (
            f"{held} held + {len(self._free)} free != {self.num_usable} blocks"
        )
