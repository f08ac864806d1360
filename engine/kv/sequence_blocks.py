"""The blocks of one sequence, in every KV group. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .eviction import NEVER, EvictionPlan
from .prefix_cache import Prefix

BlockTable = npt.NDArray[np.int64]
"""The blocks of one sequence in one KV group, by position. A table is never changed in place: a
change makes another one, so that whoever has copied a table knows from its identity that the copy
is still right."""


def block_table(block_ids: Sequence[int] | BlockTable) -> BlockTable:
    """A read-only table of these blocks."""
    table = np.array(block_ids, dtype=np.int64)
    table.flags.writeable = False
    return table


NO_BLOCKS = block_table([])


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """The block tables of one sequence, all of the same length. Only `KvBlocks` and its groups
    change it."""

    tables: list[BlockTable]
    """The block of places `[i * size, (i + 1) * size)`, per group; NULL_BLOCK if a window freed
    it or it is swapped out. A token's place is its position less `num_evicted`."""
    num_freed: list[int]
    """The number of first blocks that windows have freed, per group; sinks are kept."""
    host_slots: list[dict[int, int]]
    """The host slots of swapped-out blocks, by table index, per group; also those of cached
    prefixes that `KvBlocks.grow` is to copy to the device."""
    num_to_fetch: int = 0
    """The number of first tokens that the device lacks and the host has cached, until they are
    copied; 0 if the host slots are the sequence's own."""
    num_writable: int = 0
    """Tokens up to this number have blocks that only this sequence holds, so they may be
    written. It includes the evicted ones."""
    num_tokens_handled: int = 0
    """`KvBlocks.advance` has nothing to do until more tokens than this are computed."""
    num_published: int = 0
    """The number of first blocks that were published or found in the prefix cache."""
    chain: list[Prefix] = field(default_factory=list)
    """The known keys of the sequence's prefixes; includes at least the published ones."""
    eviction: EvictionPlan | None = None
    """None: all computed tokens stay in the cache."""
    num_evicted: int = 0
    """The computed tokens that have no place: those that every layer and KV head has evicted, each
    its own, and those of entries that were removed from the tables."""
    compacts_at: int = NEVER
    """The step that computes up to this number of tokens compacts the cache, and none computes
    more."""
    slides_at: int = NEVER
    """From this place on, the entries of blocks that the windows of all groups have freed are
    removed from the tables, so that these stay bounded."""
    targets: list[BlockTable] = field(default_factory=list)
    """Where it moves the kept tokens, per group; empty before that step."""
    held_seconds: list[float] = field(default_factory=list)
    """Per group, the device blocks held so far times the seconds for which they were held, shared
    blocks divided by their holders. It is right once all are released: until then, it lacks the
    meters of those that are held."""

    @classmethod
    def empty(
        cls, num_groups: int, eviction: EvictionPlan | None = None, *, slides_at: int = NEVER
    ) -> SequenceBlocks:
        return cls(
            tables=[NO_BLOCKS] * num_groups,
            num_freed=[0] * num_groups,
            host_slots=[{} for _ in range(num_groups)],
            held_seconds=[0.0] * num_groups,
            eviction=eviction,
            compacts_at=eviction.next_after(0) if eviction else NEVER,
            slides_at=slides_at,
        )

    @property
    def may_evict(self) -> bool:
        """Whether `num_evicted` may ever be more than 0."""
        return self.eviction is not None or self.slides_at != NEVER

    @property
    def is_swapped(self) -> bool:
        return any(self.host_slots)
