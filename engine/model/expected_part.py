"""What the first rank of a stage would hold of a base that is not loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...adapters.layout import BaseLayout
from ...adapters.layout_part import LayoutPart, SliceRange
from ...kernels.quantized_part import part_of
from ..checkpoint.stored_weights import Values
from ..config import EngineConfig
from ..errors import UnsupportedModel
from ..kv.groups import LayerKvShape
from ..shards.rank_place import RankPlace, StagePlace
from ..shards.shard_plan import ShardStyle
from .divided_ends import plan_vocabulary
from .embedding_and_head import declare_ends
from .head_parameters import HEAD_PARAMETERS, QUERIES
from .part_plan import plan_part
from .stage_layers import plan_stages

_NOTHING = LayerKvShape(0, 0, 0)
_KEYS = ("k_proj", "kv_b_proj")
"""The linear layers whose outputs are cached, by heads."""


class ExpectedPart:
    """Cuts what is expected of a whole base. The first rank holds most, if ranks differ."""

    def __init__(
        self, model: PreTrainedModel, config: Any, engine: EngineConfig, stage: int
    ) -> None:
        """Raises UnsupportedModel if the base cannot be divided."""
        size, num_stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
        self._place = RankPlace(0, size)
        self._plan = plan_part(
            model,
            config,
            self._place,
            is_staged=num_stages > 1,
            needs_experts=engine.enable_expert_parallel,
        )
        self._stages = plan_stages(model, config, num_stages)
        self._stage = StagePlace(stage, num_stages)
        ends = declare_ends(model)
        vocabulary = plan_vocabulary(ends, size)
        self._tokens = vocabulary[0].tokens if vocabulary else None
        self._model_type: str = config.model_type

    @property
    def has_embedding(self) -> bool:
        return self._stage.is_first

    @property
    def has_head(self) -> bool:
        return self._stage.is_last

    def holds(self, path: str) -> bool:
        """Whether the stage holds anything of this module or parameter."""
        layer = self._stages.layer_of(path)
        return layer is None or layer in self._stages.layers(self._stage.stage)

    def weight(self, path: str, weight: Values) -> Values:
        """The rank's part of a linear layer's weight `[out, in]`. Raises UnsupportedModel if its
        groups cannot be divided."""
        shard = self._plan.linears.get(path)
        if shard is None:
            return weight
        inputs, outputs = shard.held
        if isinstance(weight, Tensor):
            return weight[outputs.start : outputs.stop, inputs.start : inputs.stop]
        part = part_of(weight, outputs, inputs)
        if part is None:
            raise UnsupportedModel(
                f"{path} has groups of {weight.group} inputs, which cannot be divided among "
                f"{self._place.size} ranks of {len(inputs)} inputs"
            )
        return part

    def tokens(self, num_tokens: int) -> int:
        """The rank's rows of an end with so many."""
        return num_tokens if self._tokens is None else len(self._tokens)

    def num_experts(self, path: str, count: int) -> int:
        """The rank's of the experts of the module at this path."""
        return len(self._plan.experts.get(path, range(count)))

    def rows(self, path: str, count: int) -> int:
        """The rank's rows of a parameter that is no linear layer's and no end's: it has a row for
        each expert, for each query head, or is whole."""
        owner, _, name = path.rpartition(".")
        if name in HEAD_PARAMETERS and f"{owner}.{QUERIES}" in self._plan.linears:
            return count // self._place.size
        return self.num_experts(owner, count)

    def layout_part(self, layout: BaseLayout) -> LayoutPart:
        """What the rank holds of the linear layers and experts that adapters change."""
        ranges: dict[str, SliceRange] = {
            path: shard.held for path, shard in self._plan.linears.items()
        }
        names = frozenset(each.name for each in layout.slices if self.holds(each.name))
        return LayoutPart(layout, ranges, held=names)

    def kv_shape(self, layer: int, whole: LayerKvShape) -> LayerKvShape:
        """What a layer caches on this rank. Raises UnsupportedModel for states of several ranks,
        whose sizes only a start knows."""
        if not self.holds(f"{self._stages.layers_path}.{layer}"):
            return _NOTHING
        if self._place.size == 1:
            return whole
        if whole.states:
            raise UnsupportedModel(
                f"the states of {self._model_type} on several ranks are only known at a start"
            )
        return whole._replace(num_heads=self._held_heads(layer, whole.num_heads))

    def _held_heads(self, layer: int, num_heads: int) -> int:
        prefix = f"{self._stages.layers_path}.{layer}."
        for path, shard in self._plan.linears.items():
            is_keys = path.startswith(prefix) and path.rpartition(".")[2] in _KEYS
            if is_keys and shard.style is ShardStyle.COLUMN:
                return max(1, num_heads // self._place.size)
        return num_heads
