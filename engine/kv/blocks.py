"""Which KV blocks every sequence holds: all that the scheduler knows of KV memory.

Torch-free. Bookkeeping happens at once; what it means for the tensors is written down as operations
and executed before the next forward. So a block may be promised before it is zeroed, copied or
filled, but nobody reads it before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...adapters.identity import AdapterKey
from .group_blocks import GroupBlocks
from .layout import KvGroup, OperationLog, num_blocks_for
from .prefix_cache import CacheNamespace
from .sequence_blocks import SequenceBlocks
from .shared_prefixes import SharedPrefixes


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
        self._block_size = block_size
        self.operations = OperationLog()
        """What the tensors have to do before the next forward."""
        self.groups = tuple(
            GroupBlocks(index, layout, block_size, num_swap_slots=count, operations=self.operations)
            for index, (layout, count) in enumerate(zip(groups, slots, strict=True))
        )
        self._windowed = tuple(group for group in self.groups if group.layout.window is not None)
        self._prefixes = (
            SharedPrefixes(self.groups, block_size, secret=prefix_secret) if prefix_secret else None
        )

    # --- a sequence's way -------------------------------------------------------------------------

    def new_sequence(self) -> SequenceBlocks:
        return SequenceBlocks.empty(len(self.groups))

    def match(
        self, seq: SequenceBlocks, namespace: CacheNamespace, token_ids: Sequence[int]
    ) -> int:
        """Share the longest cached prefix, at least one token short of the whole; its tokens.

        The sequence must be empty.
        """
        assert not seq.tables[0], "only an empty sequence can take over a prefix"
        if self._prefixes is None:
            return 0
        num_blocks = self._prefixes.longest_hit(seq.chain, namespace, token_ids)
        for group in self.groups:
            group.take_prefix(seq, seq.chain[:num_blocks])
        seq.num_published = num_blocks
        return num_blocks * self._block_size

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> bool:
        """Let `child` share the parent's blocks of the first `num_tokens`, copied on write.

        Both are of one namespace and agree in these tokens, which are computed. False, and nothing
        shared, if the parent is swapped out or has left behind what the child's windows need.
        """
        assert not child.tables[0], "only an empty sequence can become a fork"
        if parent.is_swapped or not all(
            group.can_fork(parent, num_tokens) for group in self.groups
        ):
            return False
        for group in self.groups:
            group.fork(parent, child, num_tokens)
        parent.num_writable = 0
        num_full = num_tokens // self._block_size
        child.num_published = min(parent.num_published, num_full)
        child.chain = parent.chain[:num_full]
        return True

    def num_missing(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> tuple[int, ...]:
        """Per group, how many free blocks it takes to compute `num_tokens` more.

        Copies on write and the way back from the host are included. `chunk`: computed in steps of
        at most so many tokens, windows freeing blocks in between; None: in one step.
        """
        return tuple(
            group.num_missing(seq, num_computed, num_tokens, chunk) for group in self.groups
        )

    def grow(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make `num_tokens` more tokens writable, in all groups or not at all (False)."""
        if num_computed + num_tokens <= seq.num_writable:
            return True
        for group in self.groups:
            if group.num_missing(seq, num_computed, num_tokens) > group.pool.num_free:
                return False
        if seq.is_swapped:
            self._swap_in(seq)
        for group in self.groups:
            group.grow(seq, num_computed, num_tokens)
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
        if self._prefixes is not None:
            self._prefixes.publish(seq, namespace, token_ids, num_full)
        for group in self._windowed:
            group.leave_behind(seq, num_computed)
        if not self._windowed:
            seq.num_tokens_handled = (num_full + 1) * self._block_size - 1

    def shrink(self, seq: SequenceBlocks, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens`, of which no more are computed.

        They are handed out first: what they hold is of no use to anybody.
        """
        num_blocks = num_blocks_for(num_tokens, self._block_size)
        for group in self.groups:
            group.shrink(seq, num_blocks)
        seq.num_writable = min(seq.num_writable, num_blocks * self._block_size)

    def release(self, seq: SequenceBlocks) -> None:
        """Give back all blocks and host slots; idempotent."""
        for group in self.groups:
            group.release(seq)
        seq.num_published = seq.num_writable = seq.num_tokens_handled = 0

    def swap_out(self, seq: SequenceBlocks, num_computed: int) -> bool:
        """Move the computed blocks to the host.

        False, and nothing done, if it has no room or windows have left nothing to move.

        What others share is copied too: on the device only this sequence's hold on it ends.
        """
        num_blocks = num_blocks_for(num_computed, self._block_size)
        counts = [group.num_to_swap(seq, num_blocks) for group in self.groups]
        if not any(counts) or any(
            count > group.swap.num_free for count, group in zip(counts, self.groups, strict=True)
        ):
            return False
        for group in self.groups:
            group.swap_out(seq, num_blocks)
        seq.num_writable = 0
        return True

    def _swap_in(self, seq: SequenceBlocks) -> None:
        for group in self.groups:
            group.swap_in(seq)
        seq.num_published = 0  # what came back from the host is offered to others again

    def drop_adapter(self, key: AdapterKey) -> int:
        """Forget all prefixes computed under this adapter; return how many blocks that was."""
        return sum(group.cached.drop_adapter(key) for group in self.groups)

    # --- sizes ------------------------------------------------------------------------------------

    def longest(self) -> int:
        """Tokens one sequence may reach if it runs alone, a block's worth of tokens a step."""
        return min(group.longest() for group in self.groups)

    def fits_alone(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence can reach `num_tokens` alone, `chunk` tokens a step."""
        return all(group.fits_alone(num_tokens, chunk) for group in self.groups)

    def share(self, seq: SequenceBlocks) -> float:
        """The largest part of a group's blocks that the sequence holds."""
        if seq.is_swapped:
            return 0.0
        return max(group.num_held(seq) / group.pool.num_usable for group in self.groups)

    def num_free(self, group: int) -> int:
        return self.groups[group].pool.num_free

    def num_usable(self, group: int) -> int:
        return self.groups[group].pool.num_usable

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Assert that every block and slot is free or held by exactly these sequences."""
        sequences = list(live)
        for group in self.groups:
            group.check_integrity(sequences)
