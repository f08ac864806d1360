"""The cost of a base per step: bytes read and operations of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.base_model import BaseModel
from .utilization import KvReads, ModelCost

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""The names of these settings in configurations: the experts of a layer, those of a token."""


def model_cost(base: BaseModel, kv_reads: tuple[KvReads, ...]) -> ModelCost:
    num_experts = _setting(base.config, _NUM_EXPERTS)
    num_held = {num_experts, *(len(part.held) for each in base.moe_layers for part in each.experts)}
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for weight in _weights_read_whole(base.model):
        is_expert = weight.ndim == 3 and weight.shape[0] in num_held
        (experts if is_expert else shared).append(weight)
    linears = [fused.linear for fused in base.projections]
    head = base.packed_ends.head
    read = linears if head is None else [*linears, head]
    return ModelCost(
        shared_bytes=sum(weight.nbytes for weight in shared)
        + sum(linear.weight_bytes for linear in read),
        shared_parameters=sum(linear.in_features * linear.out_features for linear in linears),
        head_parameters=_num_head_parameters(base.model),
        kv_reads=kv_reads,
        expert_bytes=sum(weight.nbytes for weight in experts)
        + sum(packed.weight_bytes for packed in base.packed_experts),
        expert_parameters=sum(weight.numel() for weight in experts)
        + sum(prod(packed.shape) for packed in base.packed_experts),
        expert_share=_expert_share(base.config, num_experts),
    )


def _expert_share(config: Any, num_experts: int) -> float:
    """The share of a layer's experts that a token uses; all of them if nothing says how many."""
    if not num_experts:
        return 0.0
    return (_setting(config, _NUM_CHOSEN) or num_experts) / num_experts


def _weights_read_whole(model: PreTrainedModel) -> Iterator[Tensor]:
    """All weights except tables of which a step reads a few rows; a tied table is the output head
    too."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head
    }
    for parameter in model.parameters():
        if id(parameter) not in tables:
            yield parameter


def _num_head_parameters(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return int(head.in_features) * int(head.out_features)


def _setting(config: Any, names: tuple[str, ...]) -> int:
    """The first of these settings that the configuration has; 0 without any."""
    return next((found for name in names if (found := getattr(config, name, None))), 0)
