"""KV heads that several ranks hold, because there are fewer of them than ranks.

Neighbouring ranks then cache the same head, and each computes a part of the query heads that read
it. What concerns the head as a whole is a sum over these ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .rank_sums import RankSums
from .shard_plan import Shard, ShardStyle


class SharedHeads:
    """The ranks that hold the KV head of this rank."""

    def __init__(self, ranks: RankSums, num_sharing: int) -> None:
        """`num_sharing`: ranks per KV head."""
        self._ranks = ranks
        first = ranks.place.rank // num_sharing * num_sharing
        self._sharing = slice(first, first + num_sharing)

    def add(self, part: Tensor) -> Tensor:
        """The sum of the parts of the ranks that hold this head, in rank order. All ranks of the
        group call it, with tensors of one shape."""
        first, *others = self._ranks.gather(part)[self._sharing]
        for other in others:
            first += other
        return first


def find_shared_heads(
    config: Any, shards: Mapping[str, Shard], ranks: RankSums
) -> SharedHeads | None:
    """`shards`: this rank's part of each divided layer, by path. None: no KV head is on several
    ranks that read it with different query heads."""
    num_heads = getattr(config, "num_key_value_heads", None)
    if num_heads is None or num_heads >= ranks.place.size:
        return None
    styles = {shard.style for path, shard in shards.items() if path.endswith("k_proj")}
    if ShardStyle.COLUMN not in styles:
        return None  # every rank has the whole attention
    return SharedHeads(ranks, ranks.place.size // num_heads)
