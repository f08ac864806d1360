"""The blocks of one sequence, in every KV group. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from .prefix_cache import Prefix


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """Only `KvBlocks` and its groups change it. All tables are equally long."""

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

    @classmethod
    def empty(cls, num_groups: int) -> SequenceBlocks:
        return cls(
            tables=[[] for _ in range(num_groups)],
            num_freed=[0] * num_groups,
            host_slots=[{} for _ in range(num_groups)],
        )

    @property
    def is_swapped(self) -> bool:
        return any(self.host_slots)
