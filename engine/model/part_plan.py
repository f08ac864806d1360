"""How a base is divided, from its model and its configuration: nothing of it is read."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from ..shards.rank_place import RankPlace
from ..shards.shard_plan import LinearSize, ShardPlan, plan_shards
from .base_model import decoder_linears, whole_projection
from .experts import matrices_shape, parameter_names, served_experts


def plan_part(
    model: PreTrainedModel, config: Any, place: RankPlace, *, is_staged: bool, needs_experts: bool
) -> ShardPlan:
    """What a rank holds. A stage of one rank holds its layers whole and has nothing to exchange; a
    group of one rank exchanges as one of several does, with itself.

    `is_staged`: the layers are divided among stages. Raises UnsupportedModel if the base cannot be
    divided, or has no experts although `needs_experts`.
    """
    sizes = {}
    for path, module in decoder_linears(model).items():
        (part,) = whole_projection([(path, module)]).slices
        sizes[path] = LinearSize(part.in_features, part.out_features)
    num_experts = {
        path: matrices_shape(module, parameter_names(module)[0])[0]
        for path, module in served_experts(model).items()
    }
    if needs_experts and not num_experts:
        raise UnsupportedModel(
            f"--enable-expert-parallel is not supported for {config.model_type}: it has no experts"
        )
    if is_staged and place.size == 1:
        return ShardPlan({}, {path: range(count) for path, count in num_experts.items()})
    # Llama 4's class names the decoder of the composite model, of which it is the text part.
    prefix = model.base_model_prefix if model.base_model is not model else "model"
    return plan_shards(config, prefix, sizes, place, num_experts=num_experts)
