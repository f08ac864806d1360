"""Which KV blocks every sequence holds: all that the scheduler knows of KV memory.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..adapters.identity import AdapterKey
from .kv_layout import KvGroup, KvOperation
from .prefix_cache import CacheNamespace


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """The blocks of one sequence; only KvBlocks changes it."""

    tables: list[list[int]]
    """Per group the block of positions `[i * size, (i + 1) * size)`; NULL_BLOCK where it was freed
    behind a window or swapped out."""
    num_published: int = 0
    host_slots: list[dict[int, int]] = field(default_factory=list)
    """Per group, by table index, where the content of swapped-out blocks is."""

    @property
    def is_swapped(self) -> bool:
        return any(self.host_slots)


class KvBlocks:
    """Gives sequences blocks of every group, all groups or none."""

    num_prefix_evictions: int
    """Cached blocks that were handed out again."""
    num_copies: int
    """Blocks copied on write."""
    num_swapped_out: int
    """Blocks."""
    num_swapped_in: int

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
        raise NotImplementedError

    def new_sequence(self) -> SequenceBlocks:
        raise NotImplementedError

    def match(
        self, seq: SequenceBlocks, namespace: CacheNamespace, token_ids: Sequence[int]
    ) -> int:
        """Share the longest cached prefix, at least one token short of the whole; its tokens.

        The sequence must be empty.
        """
        raise NotImplementedError

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> bool:
        """Let `child` share the parent's blocks of the first `num_tokens`, copied on write.

        False, and nothing shared, if the parent is swapped out or has already left behind what the
        child's windows need.
        """
        raise NotImplementedError

    def num_missing(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> tuple[int, ...]:
        """Per group, how many free blocks it takes to compute `num_tokens` more.

        Copies on write and the way back from the host are included. `chunk`: computed in steps of
        at most so many tokens, windows freeing blocks in between; None: in one step.
        """
        raise NotImplementedError

    def can_grow(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> bool:
        raise NotImplementedError

    def grow(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make `num_tokens` more tokens writable, in all groups or not at all (False)."""
        raise NotImplementedError

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
        raise NotImplementedError

    def release(self, seq: SequenceBlocks) -> None:
        """Give back all blocks and host slots; idempotent."""
        raise NotImplementedError

    def swap_out(self, seq: SequenceBlocks, num_computed: int) -> bool:
        """Move the computed blocks to the host; False, and nothing done, if it has no room."""
        raise NotImplementedError

    def take_operations(self) -> list[KvOperation]:
        """What the tensors have to do before the next forward, in this order."""
        raise NotImplementedError

    def longest(self) -> int:
        """Tokens one sequence may reach if it runs alone, a block's worth of tokens a step."""
        raise NotImplementedError

    def fits_alone(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence can reach `num_tokens` alone, `chunk` tokens a step."""
        raise NotImplementedError

    def share(self, seq: SequenceBlocks) -> float:
        """The largest part of a group's blocks that the sequence holds."""
        raise NotImplementedError

    def drop_adapter(self, key: AdapterKey) -> int:
        """Forget all prefixes computed under this adapter; return how many blocks that was."""
        raise NotImplementedError

    def num_free(self, group: int) -> int:
        raise NotImplementedError

    def num_usable(self, group: int) -> int:
        raise NotImplementedError

    @property
    def num_cached_blocks(self) -> int:
        raise NotImplementedError

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Assert that every block and slot is free or held by exactly these sequences."""
        raise NotImplementedError
