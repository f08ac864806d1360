"""What concerns a KV head is added up over the ranks that read it, and over no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loraplex.adapters.layout_part import SliceRange
from loraplex.engine.shards.rank_sums import RankSums
from loraplex.engine.shards.shard_plan import Shard, ShardStyle
from loraplex.engine.shards.shared_heads import SharedHeads, find_shared_heads
from support.ranks import run_ranks

HELD = SliceRange(range(8), range(4))


@pytest.mark.parametrize("num_sharing", [2, 4])
def test_the_parts_of_the_ranks_of_a_head_are_added(num_sharing: int) -> None:
    def run(ranks: RankSums) -> list[float]:
        return SharedHeads(ranks, num_sharing).add(torch.tensor([2.0**ranks.place.rank])).tolist()

    expected = [[3.0], [3.0], [12.0], [12.0]] if num_sharing == 2 else [[15.0]] * 4
    assert run_ranks(4, run) == expected


@pytest.mark.parametrize(
    ("num_heads", "style", "is_shared"),
    [
        (1, ShardStyle.COLUMN, True),
        (2, ShardStyle.COLUMN, False),
        (1, ShardStyle.GATHERED, False),
        (None, ShardStyle.COLUMN, False),
    ],
)
def test_a_head_is_shared_if_there_are_fewer_than_ranks_and_attention_is_divided(
    num_heads: int | None, style: ShardStyle, is_shared: bool
) -> None:
    config = SimpleNamespace(num_key_value_heads=num_heads)
    shards = {"layers.0.self_attn.k_proj": Shard(style, HELD)}
    found = run_ranks(2, lambda ranks: find_shared_heads(config, shards, ranks))
    assert [each is not None for each in found] == [is_shared] * 2
