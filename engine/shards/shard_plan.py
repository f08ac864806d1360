"""What each rank of a tensor-parallel group holds of the base's layers. Torch-free.

transformers declares for most families how their linear layers can be divided, as strings
(`base_model_tp_plan`). This module reads the strings and nothing else of transformers; `own_plans`
adds what they leave out. A layer that no plan names is held whole by every rank.
Experts need no plan: a rank holds some of a layer's, each whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from ...adapters.layout_part import SliceRange
from ..errors import UnsupportedModel
from .own_plans import OWN_PLANS
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


_HELD_WHOLE = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj"})
"""The strings of layers that every rank holds whole. All heads of a multi-head latent attention
read the same latent."""
_HEADS_OF = {
    "q_proj": "num_attention_heads",
    "q_b_proj": "num_attention_heads",
    "kv_b_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
}
"""The setting that tells the heads of a layer's outputs, by the layer's name."""
_SHARED_HEADS = frozenset({"k_proj", "v_proj"})
"""The layers whose heads several query heads read."""
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class LinearSize(NamedTuple):
    """The size of a whole linear layer."""

    in_features: int
    out_features: int


class Shard(NamedTuple):
    """One rank's part of a linear layer."""

    style: ShardStyle
    held: SliceRange


class ShardPlan(NamedTuple):
    """One rank's part of a base's decoder. What is not named is held whole."""

    linears: dict[str, Shard]
    """By the paths of the divided linear layers."""
    experts: dict[str, range]
    """The experts that the rank holds, by the path of their module."""


def plan_shards(
    config: Any,
    prefix: str,
    sizes: Mapping[str, LinearSize],
    place: RankPlace,
    *,
    num_experts: Mapping[str, int],
) -> ShardPlan:
    """A rank's part of each layer that is divided.

    `prefix`: the path of the decoder in the model. `sizes`: of its linear layers, by path.
    `num_experts`: of a layer's, by the path of their module. Raises UnsupportedModel if nothing of
    the family can be divided, or if a layer, its heads or its experts cannot be divided among so
    many ranks.
    """
    plan = read_plan(config)
    linears = {}
    for path, size in sizes.items():
        style = plan.get(_LAYER_NUMBER.sub("*", path.removeprefix(f"{prefix}.")))
        if style is not None and style not in _HELD_WHOLE:
            linears[path] = _Division(config, path, place).shard(style, size)
    experts = {
        path: _Division(config, path, place).part(count, "experts")
        for path, count in num_experts.items()
    }
    if not (linears or experts):
        reason = "its plan names none of its linear layers" if plan else "it has no plan"
        raise UnsupportedModel(
            f"tensor parallelism is not supported for {config.model_type}: {reason}"
        )
    return ShardPlan(linears, experts)


def read_plan(config: Any) -> Mapping[str, str]:
    """The styles of the family's layers, by their paths in the decoder; a layer's number is `*`."""
    theirs: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return {**theirs, **OWN_PLANS.get(config.model_type, {})}


class _Division(NamedTuple):
    """Divides one layer."""

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
            outputs = self.part(size.out_features, "outputs")
        else:
            inputs = self.part(size.in_features, "inputs")
        return Shard(kind, SliceRange(inputs, outputs))

    def _heads_part(self, out_features: int) -> range:
        """Outputs that later layers read by heads: a rank has whole heads.

        If there are fewer KV heads than ranks, neighbouring ranks hold the same head.
        """
        leaf = self.path.rpartition(".")[2]
        if leaf not in _HEADS_OF:
            return self.part(out_features, "outputs")
        num_heads = getattr(self.config, _HEADS_OF[leaf], None)
        if not isinstance(num_heads, int):
            return self.part(out_features, "outputs")
        rank, num_ranks = self.place
        is_shared = leaf in _SHARED_HEADS and num_ranks > num_heads
        if not is_shared or num_ranks % num_heads:
            heads = self.part(num_heads, "heads")
        else:
            first = rank * num_heads // num_ranks
            heads = range(first, first + 1)
        head_size = out_features // num_heads
        return range(heads.start * head_size, heads.stop * head_size)

    def part(self, count: int, what: str) -> range:
        """This rank's share of so many inputs, outputs, heads or experts."""
        rank, num_ranks = self.place
        if count % num_ranks:
            raise UnsupportedModel(
                f"{self.path} has {count} {what}, which cannot be divided among {num_ranks} ranks"
            )
        size = count // num_ranks
        return range(rank * size, (rank + 1) * size)
