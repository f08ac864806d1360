"""What each rank of a tensor-parallel group holds of the base's linear layers. Torch-free.

transformers declares for each family how its linear layers can be divided, as strings
(`base_model_tp_plan`). This module reads the strings and nothing else of transformers. A layer that
the plan does not name is held whole by every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from ...adapters.layout_part import SliceRange
from ..errors import UnsupportedModel
from .rank_place import RankPlace


class ShardStyle(StrEnum):
    """How a linear layer is divided among the ranks; the values are transformers' strings."""

    COLUMN = "colwise"
    """A rank computes a part of the outputs, which its own next layers read."""
    GATHERED = "colwise_gather_output"
    """A rank computes a part of the outputs, and every rank then has all outputs."""
    ROW = "rowwise"
    """A rank has a part of the inputs, and the results of all ranks are added."""
    SPLIT_ROW = "rowwise_split_input"
    """Like ROW, but a rank has all inputs and reads a part of them."""

    @property
    def sums(self) -> bool:
        """Whether the ranks' results are added."""
        return self in (ShardStyle.ROW, ShardStyle.SPLIT_ROW)


_HELD_WHOLE = frozenset({"replicated_with_grad_allreduce"})
"""The strings of layers that every rank holds whole."""
_HEADS_OF = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
}
"""The setting that tells the heads of a layer's outputs, by the layer's name."""
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class LinearSize(NamedTuple):
    """The size of a whole linear layer."""

    in_features: int
    out_features: int


class Shard(NamedTuple):
    """One rank's part of a linear layer."""

    style: ShardStyle
    held: SliceRange


def plan_shards(
    config: Any, prefix: str, sizes: Mapping[str, LinearSize], place: RankPlace
) -> dict[str, Shard]:
    """A rank's part of each divided linear layer, by path; the others are held whole.

    `prefix`: the path of the decoder in the model. Raises UnsupportedModel if the family has no
    plan, or if a layer or its heads cannot be divided among so many ranks.
    """
    plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(
            f"tensor parallelism is not supported for {config.model_type}: transformers has no "
            "plan for its layers"
        )
    shards = {}
    for path, size in sizes.items():
        style = plan.get(_LAYER_NUMBER.sub("*", path.removeprefix(f"{prefix}.")))
        if style is not None and style not in _HELD_WHOLE:
            shards[path] = _Division(config, path, place).shard(style, size)
    if not shards:
        raise UnsupportedModel(
            f"tensor parallelism is not supported for {config.model_type}: its plan names none of "
            "its linear layers"
        )
    return shards


class _Division(NamedTuple):
    """Divides one linear layer."""

    config: Any
    path: str
    place: RankPlace

    def shard(self, style: str, size: LinearSize) -> Shard:
        if style not in [served.value for served in ShardStyle]:
            raise UnsupportedModel(
                f"tensor parallelism is not supported for {self.config.model_type}: its plan "
                f"divides {self.path} as {style}"
            )
        inputs, outputs = range(size.in_features), range(size.out_features)
        kind = ShardStyle(style)
        if kind is ShardStyle.COLUMN:
            outputs = self._heads_part(size.out_features)
        elif kind is ShardStyle.GATHERED:
            outputs = self._part(size.out_features, "outputs")
        else:
            inputs = self._part(size.in_features, "inputs")
        return Shard(kind, SliceRange(inputs, outputs))

    def _heads_part(self, out_features: int) -> range:
        """Outputs that later layers read by heads: a rank has whole heads.

        If there are fewer KV heads than ranks, neighbouring ranks hold the same head.
        """
        leaf = self.path.rpartition(".")[2]
        if leaf not in _HEADS_OF:
            return self._part(out_features, "outputs")
        num_heads = getattr(self.config, _HEADS_OF[leaf], None)
        if not isinstance(num_heads, int):
            return self._part(out_features, "outputs")
        rank, num_ranks = self.place
        if num_heads >= num_ranks or num_ranks % num_heads or leaf == "q_proj":
            heads = self._part(num_heads, "heads")
        else:
            first = rank * num_heads // num_ranks
            heads = range(first, first + 1)
        head_size = out_features // num_heads
        return range(heads.start * head_size, heads.stop * head_size)

    def _part(self, count: int, what: str) -> range:
        rank, num_ranks = self.place
        if count % num_ranks:
            raise UnsupportedModel(
                f"{self.path} has {count} {what}, which cannot be divided among {num_ranks} ranks"
            )
        size = count // num_ranks
        return range(rank * size, (rank + 1) * size)
