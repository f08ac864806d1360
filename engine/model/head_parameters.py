"""Parameters of attention that have a value for each query head.

A rank that computes some of the heads holds their values only.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..shards.rank_place import RankPlace
from ..shards.shard_plan import Shard, ShardStyle

QUERIES = "q_proj"
HEAD_PARAMETERS = ("sinks",)
"""The names of such parameters: attention sinks (gpt_oss)."""


def cut_head_parameters(model: nn.Module, shards: Mapping[str, Shard], place: RankPlace) -> None:
    """Replace such parameters by this rank's part where queries are divided by heads.

    `shards`: the divided linear layers by path.
    """
    for path, shard in shards.items():
        parent, _, leaf = path.rpartition(".")
        if leaf == QUERIES and shard.style is ShardStyle.COLUMN:
            _cut(model.get_submodule(parent), place)


def _cut(attention: nn.Module, place: RankPlace) -> None:
    for name in HEAD_PARAMETERS:
        values = getattr(attention, name, None)
        if isinstance(values, nn.Parameter):
            count = len(values) // place.size
            held = values.detach()[place.rank * count :][:count].clone()
            setattr(attention, name, nn.Parameter(held, requires_grad=False))
